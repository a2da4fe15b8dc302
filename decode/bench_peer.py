"""The other side of `laneformer bench decode`: a dense Llama of `transformers` in PyTorch, float32.

Run as a script with the shape as JSON. Says its versions, then for every line on stdin (numbers of prompt
and new tokens as JSON) decodes greedily at batch 1 and says when each token was there. Needs nothing of
this project.
"""

import json
import sys
import time


def main() -> None:
    import torch
    import transformers

    shape = json.loads(sys.argv[1])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    model = transformers.LlamaForCausalLM(config).eval()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    parameters = sum(p.numel() for p in model.parameters())
    threads = torch.get_num_threads()
    print(json.dumps(dict(versions=versions, parameters=parameters, threads=threads)), flush=True)
    for line in sys.stdin:
        sizes = json.loads(line)
        ids = torch.randint(0, shape["vocab_size"], (1, sizes["prompt"]))
        cache = transformers.DynamicCache()
        seconds = []
        began = time.perf_counter()
        with torch.inference_mode():
            for _ in range(sizes["new"]):
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = out.logits[:, -1].argmax(-1, keepdim=True)
                int(ids)
                seconds.append(time.perf_counter() - began)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
