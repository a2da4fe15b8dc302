"""The other side of `laneformer bench train`: a dense Llama of `transformers` in PyTorch, float32.

Run as a script with the shape as JSON. Says its versions, then makes one update for every line on stdin
and says how long it took. Needs nothing of this project.
"""

import contextlib
import ctypes
import json
import sys
import time


def main() -> None:
    # As `bench.keep_freed_memory`, before anything large is allocated.
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)
        libc.mallopt(-1, -1)
        libc.mallopt(-8, 1)
    import torch
    import transformers

    shape = json.loads(sys.argv[1])
    batch, seq = shape.pop("batch"), shape.pop("seq")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(0, shape["vocab_size"], (batch, seq))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"versions": versions}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
