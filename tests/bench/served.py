"""One way to run an export, as a side to measure, under the Python of the serving environment."""

import argparse
import os

import arm

BATCH, PROMPT, NEW = 8, 32, 64
THREADS = 1  # of every side: a step of eight tokens does not fill two, and on a busy machine two wait for each other


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('side', choices=['vllm', 'transformers', 'forward', 'qwen3-moe', 'qwen3-moe-generate'])
    parser.add_argument('folder', help='an export, which gives the shape to all sides')
    return parser.parse_args()


def ids(vocab: int, length: int):
    """The same random token ids for every side."""
    import numpy as np

    return np.random.default_rng(0).integers(1, vocab, (BATCH, length)).tolist()


def qwen(c):
    """transformers' own Qwen3-MoE with the sizes of our configuration; heads and experts alike, nothing of ours beside."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim,
        intermediate_size=c.hidden_size, moe_intermediate_size=c.moe_intermediate_size, num_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_tok, max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(shape).eval()


def build(given):
    """One call of the side, and how many tokens it makes or reads."""
    if given.side == 'vllm':
        return engine(given)
    import ladderbook.serve.hf  # noqa: F401 (registers the class)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    model = qwen(model.config) if given.side.startswith('qwen3') else model
    parameters = sum(p.numel() for p in model.parameters())
    if given.side in ('forward', 'qwen3-moe'):
        rows = torch.tensor(ids(model.config.vocab_size, model.config.max_position_embeddings))
        run = torch.no_grad()(lambda: model(input_ids=rows, use_cache=False).logits)
        return run, {'tokens': rows.numel(), 'parameters': parameters}
    rows = torch.tensor(ids(model.config.vocab_size, PROMPT))
    how = {'max_new_tokens': NEW, 'min_new_tokens': NEW, 'do_sample': False, 'pad_token_id': 0}
    run = torch.no_grad()(lambda: model.generate(rows, attention_mask=torch.ones_like(rows), **how))
    return run, {'tokens': BATCH * NEW, 'parameters': parameters}


def engine(given):
    """vLLM in this process, compiled; greedy, the whole batch at once."""
    from pathlib import Path

    os.environ.update({'OMP_NUM_THREADS': str(THREADS)})
    from ladderbook.serve import engine as engines

    llm = engines.engine(Path(given.folder), compiled=True, dtype='float32', disable_log_stats=True)
    from vllm import SamplingParams

    vocab = llm.llm_engine.model_config.get_vocab_size()
    prompts = [{'prompt_token_ids': p} for p in ids(vocab, PROMPT)]
    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    return lambda: llm.generate(prompts, how, use_tqdm=False), {'tokens': BATCH * NEW}


if __name__ == '__main__':
    given = arguments()
    arm.serve(lambda: build(given))
