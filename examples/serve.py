"""Many prompts at once over one paged cache, with shared prefixes: `python -m examples.serve`. Seconds on a laptop's CPU.

Every step packs what all running requests bring, a whole prompt or the last byte, into one row of tokens and runs the GPT once:

    cache = tw.append(cache, k, v, cu_seqlens)                          # new keys go to their sequences' pages
    o = tw.attention_paged(q, cache, cu_seqlens, causal=True)           # prompts and single bytes in one call

Prompts that begin alike share the pages that they fill alike: those are computed once and attended where they lie. The bytes are
those of one request at a time (`examples/gpt/run.py`), which this program checks.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw
from examples.gpt.checkpoint import load
from examples.gpt.model import GPT, GPTConfig
from examples.gpt.run import generate

SYSTEM = b"You write short and plain functions. Answer in code alone, without comments.\n"
QUESTIONS = (
    b"def area(",
    b"def perimeter(",
    b"class Tile:",
    b"import math\n",
    b"def main():",
    b"x = [",
    b"for i in",
    b"return ",
)


@dataclass(eq=False)
class Request:
    """A prompt and what was said to it. The first ``cached`` of its bytes have keys in ``pages``."""

    prompt: bytes
    count: int
    said: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def text(self) -> bytes:
        return self.prompt + bytes(self.said)


class PagePool:
    """The pages that are free, how many requests use each of the others, and which prefix each full page ends."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.free, self.users = list(range(num_pages)), [0] * num_pages
        self.page_of: dict[bytes, int] = {}
        self.prefix_of: dict[int, bytes] = {}

    def admit(self, request: Request) -> bool:
        """Gives a request pages for all it will say, those of a known prefix first; False: there are not enough."""
        size, shared = self.page_size, []
        for end in range(
            size, len(request.prompt), size
        ):  # the last byte of a prompt is always computed: its logits are wanted
            if request.prompt[:end] not in self.page_of:
                break
            shared.append(self.page_of[request.prompt[:end]])
        wanted = -(-(len(request.prompt) + request.count) // size) - len(shared)
        if wanted > len(self.free):
            return False
        request.pages = shared + [self.free.pop() for _ in range(wanted)]
        request.cached = len(shared) * size
        for page in request.pages:
            self.users[page] += 1
        for n, end in enumerate(range(size, len(request.prompt) + 1, size)):
            # Known from now on: whoever is admitted in the same step reads the page after this request has written it.
            if self.page_of.setdefault(request.prompt[:end], request.pages[n]) == request.pages[n]:
                self.prefix_of[request.pages[n]] = request.prompt[:end]
        return True

    def release(self, request: Request) -> None:
        for page in request.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
                self.page_of.pop(self.prefix_of.pop(page, b""), None)


class Server:
    """Answers requests together, greedily.

    Attributes:
        computed: bytes that went through the model.
    """

    def __init__(self, model: GPT, num_pages: int = 256, page_size: int = 16):
        config, weight = model.config, model.embedding.weight
        self.model, self.pool, self.computed = model, PagePool(num_pages, page_size), 0
        shape = (config.layers, num_pages, page_size, config.heads_k, config.head_dim)
        self.k_pages, self.v_pages = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.max_pages = -(-config.context // page_size)

    @torch.no_grad()
    def run(self, requests: list[Request]) -> None:
        """Answers all of them; each step serves as many as there are pages for."""
        waiting, running = list(requests), []
        for request in waiting:
            most, room = (
                len(request.prompt) + request.count,
                min(self.model.config.context, self.pool.page_size * len(self.pool.users)),
            )
            if most > room:
                raise ValueError(
                    f"a prompt and its answer are {most} bytes, more than the context or all pages hold, {room}"
                )
        while waiting or running:
            while waiting and self.pool.admit(waiting[0]):
                running.append(waiting.pop(0))
            for request, byte in zip(running, self.step(running), strict=True):
                request.cached = len(request.text)
                request.said.append(byte)
            for request in [r for r in running if len(r.said) == r.count]:
                running.remove(request)
                self.pool.release(request)

    def step(self, running: list[Request]) -> list[int]:
        """The next byte of each request, from the bytes that the cache does not have yet."""
        model, device = self.model, self.k_pages.device
        new = [request.text[request.cached :] for request in running]
        self.computed += sum(map(len, new))
        tokens = torch.tensor(list(b"".join(new)), device=device)
        cu_seqlens = torch.tensor([0, *map(len, new)], device=device).cumsum(0)
        lengths = torch.tensor([request.cached for request in running], dtype=torch.int32, device=device)
        table = torch.tensor(
            [r.pages + [0] * (self.max_pages - len(r.pages)) for r in running], dtype=torch.int32, device=device
        )
        positions = torch.cat([torch.arange(r.cached, len(r.text), device=device) for r in running])
        x = model.embedding(tokens).unsqueeze(0)
        for layer, block in enumerate(model.blocks):
            block.attention.attention = self.attention(layer, table, lengths, cu_seqlens)
            x = block(x, model.angles[positions])
        return model.to_logits(model.norm(x[0, cu_seqlens[1:] - 1])).argmax(-1).tolist()

    def attention(self, layer: int, table: Tensor, lengths: Tensor, cu_seqlens: Tensor):
        """The attention of one layer and step: q, k, v ``(1, total, heads, head_dim)`` of all requests' new bytes."""
        before = tw.paged(self.k_pages[layer], self.v_pages[layer], table, lengths)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            after = tw.append(before, k[0], v[0], cu_seqlens)
            return tw.attention_paged(q[0], after, cu_seqlens, causal=True).unsqueeze(0)

        return attend


def one_at_a_time(model: GPT, requests: list[Request]) -> list[bytes]:
    """The answers of the model without a cache, which sees all bytes again for each."""
    for block in model.blocks:
        block.attention.attention = lambda q, k, v: tw.attention(q, k, v, causal=True)
    context = model.config.context
    return [bytes(generate(model, r.prompt, r.count, context=context, temperature=0)) for r in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="what training saved (default: random weights)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--count", type=int, default=64, help="bytes of each answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    model = GPT(GPTConfig(), attention=None).to(arguments.device)
    if arguments.checkpoint:
        model.load_state_dict(load(arguments.checkpoint).model)
    prompts = [SYSTEM + QUESTIONS[n % len(QUESTIONS)] for n in range(arguments.requests)]
    requests = [Request(prompt, arguments.count) for prompt in prompts]
    server = Server(model)
    start = time.perf_counter()
    server.run(requests)
    seconds = time.perf_counter() - start
    total = sum(len(r.said) for r in requests)
    print(
        f"{len(requests)} requests together: {total} tokens (bytes) in {seconds:.2f} s, {total / seconds:.0f} tokens/s"
    )
    print(
        f"{server.computed} tokens went through the model; without shared prefixes {total + sum(map(len, prompts)) - len(prompts)}"
    )
    start = time.perf_counter()
    alone = one_at_a_time(model, requests[: len(QUESTIONS)])
    seconds = time.perf_counter() - start
    total = sum(map(len, alone))
    print(f"{len(alone)} of them one at a time, without a cache: {total / seconds:.0f} tokens/s")
    if alone != [bytes(r.said) for r in requests[: len(QUESTIONS)]]:
        raise SystemExit("the two say different tokens")
    print("both say the same tokens")


if __name__ == "__main__":
    main()
