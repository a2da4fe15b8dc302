"""The other side of `gpu_decode.py`: a dense Llama of `transformers` in PyTorch, bfloat16, static cache.

Run as a script with the shape as JSON. Says its versions, then for every line on stdin (context and number
of tokens, as JSON) says the seconds per greedily decoded token. On a GPU the step is compiled with
`mode="reduce-overhead"`, which replays it as one CUDA graph. Needs nothing of this project.
"""

import json
import sys
import time


def main() -> None:
    import torch
    import transformers

    shape = json.loads(sys.argv[1])
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    name = torch.cuda.get_device_name() if on_gpu else "CPU, not compiled"
    print(json.dumps(dict(versions=versions, device=name)), flush=True)

    def step(ids: torch.Tensor, position: torch.Tensor, cache: object) -> torch.Tensor:
        out = model(ids, past_key_values=cache, cache_position=position, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    one = torch.compile(step, mode="reduce-overhead", fullgraph=True) if on_gpu else step
    for line in sys.stdin:
        sizes = json.loads(line)
        room = sizes["context"] + 2 * sizes["tokens"] + 1
        cache = transformers.StaticCache(config=config, max_cache_len=room)
        ids = torch.zeros((1, 1), dtype=torch.long, device=device)

        def run(first: int, count: int, ids: torch.Tensor, cache: object) -> float:
            began = time.perf_counter()
            with torch.inference_mode():
                for i in range(count):
                    position = torch.tensor([first + i], device=device)
                    ids = one(ids, position, cache).clone()
            if on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        run(sizes["context"], sizes["tokens"], ids, cache)  # compiles
        seconds = run(sizes["context"] + sizes["tokens"], sizes["tokens"], ids, cache)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
