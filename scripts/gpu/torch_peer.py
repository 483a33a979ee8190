"""The local-history decoder at 126M as a PyTorch user would write it for speed: what duokv's CUDA numbers stand beside.

Document masks through FlexAttention: one call over 2N keys, the global and the local bank one after the other. Blocks are
compiled by torch.compile (one compilation serves all layers), AdamW is fused, prefill and decoding run with a static
cache, decoding also as a CUDA graph. FP32 has TF32 off; bf16 is autocast in training and bf16 weights in inference.

  python scripts/gpu/torch_peer.py [--out FILE] [--seconds 270] [--only train,prefill,decode] [--tiny]

Every raw time is in the record, which is written after each measurement; what fails, or no longer fits into --seconds,
is named there. --tiny is a trial on the CPU, without FlexAttention and the compiler.
"""

import argparse
import json
import statistics
import sys
import time
import traceback

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Shape:
    vocab, hidden, ffn, lower, upper = 32768, 768, 2048, 8, 8
    heads, kv_heads, head_dim, window = 12, 4, 64, 128
    prompt, steps, rows, length, document = 1792, 128, 64, 2048, 600


class Tiny(Shape):
    vocab, hidden, ffn, lower, upper = 512, 128, 352, 2, 2
    heads, kv_heads, head_dim, window = 4, 2, 32, 32
    prompt, steps, rows, length, document = 48, 8, 4, 64, 20


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


def linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def rotate(x, cos, sin):
    """x [B, heads, N, head_dim]; cos, sin [B or 1, 1, N, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attend(q, k, v, mask):
    """`mask`: a BlockMask, a boolean tensor [queries, keys], or 'causal'."""
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.shape = s
        self.n1, self.n2 = Norm(s.hidden), Norm(s.hidden)
        self.q, self.o = linear(s.hidden, s.heads * s.head_dim), linear(s.heads * s.head_dim, s.hidden)
        self.k, self.v = (linear(s.hidden, s.kv_heads * s.head_dim) for _ in range(2))
        self.gate, self.up, self.down = linear(s.hidden, s.ffn), linear(s.hidden, s.ffn), linear(s.ffn, s.hidden)

    def split(self, x, heads):
        return x.view(x.shape[0], x.shape[1], heads, self.shape.head_dim).transpose(1, 2)

    def kv(self, h, cos, sin):
        k = rotate(self.split(self.k(h), self.shape.kv_heads), cos, sin)
        return k, self.split(self.v(h), self.shape.kv_heads)

    def finish(self, x, q, k, v, mask):
        a = attend(q, k, v, mask)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def forward(self, x, cos, sin, mask, keys=None, values=None, keep=None):
        """Gives the output of the last `keep` positions, and this block's own K and V."""
        h = self.n1(x)
        k, v = self.kv(h, cos, sin)
        if keep is not None and keep < x.shape[1]:
            x, h, cos, sin = x[:, -keep:], h[:, -keep:], cos[:, :, -keep:], sin[:, :, -keep:]
        q = rotate(self.split(self.q(h), self.shape.heads), cos, sin)
        all_k = k if keys is None else torch.cat((keys, k), 2)
        all_v = v if values is None else torch.cat((values, v), 2)
        return self.finish(x, q, all_k, all_v, mask), k, v

    def step(self, x, cos, sin, slot, bank_k, bank_v, mask, keys=None, values=None):
        """One position, written to `slot` of this block's bank."""
        h = self.n1(x)
        k, v = self.kv(h, cos, sin)
        bank_k.index_copy_(2, slot, k)
        bank_v.index_copy_(2, slot, v)
        q = rotate(self.split(self.q(h), self.shape.heads), cos, sin)
        all_k = bank_k if keys is None else torch.cat((keys, bank_k), 2)
        all_v = bank_v if values is None else torch.cat((values, bank_v), 2)
        return self.finish(x, q, all_k, all_v, mask)


class Decoder(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.shape = s
        self.embedding, self.norm, self.global_norm = nn.Embedding(s.vocab, s.hidden), Norm(s.hidden), Norm(s.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.lower + s.upper))
        self.global_k, self.global_v = (linear(s.hidden, s.kv_heads * s.head_dim) for _ in range(2))
        inverse = 10000.0 ** (-torch.arange(0, s.head_dim, 2).double() / s.head_dim)
        angles = torch.outer(torch.arange(s.length + s.steps).double(), inverse)
        self.register_buffer('table', torch.stack((angles.cos(), angles.sin())).float(), persistent=False)

    def angles(self, positions):
        """positions [B, N] -> cos, sin [B, 1, N, head_dim / 2]."""
        return self.table[0][positions].unsqueeze(1), self.table[1][positions].unsqueeze(1)

    def provide(self, x, cos, sin):
        h, block = self.global_norm(x), self.blocks[0]
        k = rotate(block.split(self.global_k(h), self.shape.kv_heads), cos, sin)
        return k, block.split(self.global_v(h), self.shape.kv_heads)

    def head(self, x):
        return F.linear(self.norm(x), self.embedding.weight)

    def forward(self, tokens, positions, lower_mask, upper_mask):
        """Logits of every position; the masks know the documents."""
        x = self.embedding(tokens)
        cos, sin = self.angles(positions)
        for block in self.blocks[: self.shape.lower]:
            x, _, _ = block(x, cos, sin, lower_mask)
        k, v = self.provide(x, cos, sin)
        for block in self.blocks[self.shape.lower :]:
            x, _, _ = block(x, cos, sin, upper_mask, k, v)
        return self.head(x)

    def prefill(self, tokens, exact, upper_mask):
        """Logits at the prompt's end, and the complete cache. upper_mask(j, rows in, rows out) for upper layer j."""
        s, n = self.shape, tokens.shape[1]
        x = self.embedding(tokens)
        cos, sin = self.angles(torch.arange(n, device=tokens.device).unsqueeze(0))
        cache = []
        for block in self.blocks[: s.lower]:
            x, k, v = block(x, cos, sin, 'causal')
            cache.append((k, v))
        gk, gv = self.provide(x, cos, sin)
        cache.append((gk, gv))
        for j, block in enumerate(self.blocks[s.lower :], 1):
            rows = [min(n, 1 + (s.upper - j + more) * (s.window - 1)) if exact else n for more in (1, 0)]
            x, c, d = x[:, -rows[0] :], cos[:, :, -rows[0] :], sin[:, :, -rows[0] :]
            x, k, v = block(x, c, d, upper_mask(*rows), gk, gv, keep=rows[1])
            cache.append((k[:, :, -s.window :], v[:, :, -s.window :]))
        return self.head(x[:, -1:]), cache

    def decode(self, token, position, cache):
        """One step. position [1] on the device; a bank of the cache has a slot per position, or `window`."""
        s = self.shape
        x = self.embedding(token)
        cos, sin = self.angles(position.unsqueeze(0))
        mask = (torch.arange(cache[0][0].shape[2], device=token.device) <= position).unsqueeze(0)
        for block, (k, v) in zip(self.blocks[: s.lower], cache):
            x = block.step(x, cos, sin, position, k, v, mask)
        gk, gv = cache[s.lower]
        k, v = self.provide(x, cos, sin)
        gk.index_copy_(2, position, k)
        gv.index_copy_(2, position, v)
        slots = torch.arange(s.window, device=token.device)
        both = torch.cat((mask, (slots <= position).unsqueeze(0)), 1)
        for block, (k, v) in zip(self.blocks[s.lower :], cache[s.lower + 1 :]):
            x = block.step(x, cos, sin, position % s.window, k, v, both, gk, gv)
        return self.head(x)


class Peer:
    def __init__(self, options):
        self.tiny, self.out = options.tiny, options.out
        self.device = 'cpu' if options.tiny else 'cuda'
        self.shape = Tiny if options.tiny else Shape
        self.deadline = time.monotonic() + options.seconds
        self.microbatch, self.repeats = options.microbatch, 2 if options.tiny else 10
        self.record = {
            'command': ' '.join(sys.argv),
            'torch': torch.__version__,
            'device': 'cpu' if options.tiny else torch.cuda.get_device_name(),
            'results': [],
            'failures': [],
        }
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def save(self):
        if self.out:
            with open(self.out, 'w') as file:
                json.dump(self.record, file, indent=1)

    def attempt(self, what, body):
        """Measures, or says why not; one failure does not stop the others."""
        if time.monotonic() > self.deadline:
            self.record['failures'].append({'what': what, 'error': 'no time was left'})
            print(f'{what}: no time was left', flush=True)
        else:
            try:
                body()
            except Exception as error:
                traceback.print_exc()
                message = f'{type(error).__name__}: {str(error)[:400]}'
                self.record['failures'].append({'what': what, 'error': message})
                print(f'{what}: {message}', flush=True)
            torch._dynamo.reset()
            if self.device == 'cuda':
                torch.cuda.empty_cache()
        self.save()

    def add(self, measure, precision, ms, **facts):
        row = {'measure': measure, 'precision': precision, **facts, 'median': statistics.median(ms)}
        print(json.dumps(row), flush=True)
        self.record['results'].append({**row, 'ms': ms})
        self.save()

    def synchronize(self):
        if self.device == 'cuda':
            torch.cuda.synchronize()

    def time(self, body, warmups, repeats):
        ms = []
        for i in range(warmups + repeats):
            self.synchronize()
            start = time.perf_counter()
            body()
            self.synchronize()
            if i >= warmups:
                ms.append((time.perf_counter() - start) * 1e3)
        return ms

    def model(self, dtype=torch.float32):
        return Decoder(self.shape).to(self.device, dtype)

    def compile(self, function, **options):
        return function if self.tiny else torch.compile(function, **options)

    def block_masks(self, ids):
        """BlockMasks of the lower and the upper layers over the buffer `ids` [B, N]."""
        batch, n = ids.shape
        window = self.shape.window

        def lower(b, _, q, k):
            return (k <= q) & (ids[b, k] == ids[b, q])

        def upper(b, _, q, k):
            at = k % n
            seen = (at <= q) & (ids[b, at] == ids[b, q])
            return seen & ((k < n) | (at > q - window))

        if self.tiny:
            q, k = torch.arange(n).view(n, 1), torch.arange(2 * n).view(1, -1)
            b = torch.arange(batch).view(-1, 1, 1)
            return lower(b, 0, q, k[:, :n]).unsqueeze(1), upper(b, 0, q, k).unsqueeze(1)
        return tuple(
            create_block_mask(mask, batch, None, n, keys, device=self.device)
            for mask, keys in ((lower, n), (upper, 2 * n))
        )

    def train(self, precision):
        microbatch = min(self.microbatch, self.shape.rows)
        while True:
            try:
                return self.train_with(precision, microbatch)
            except torch.cuda.OutOfMemoryError:
                if microbatch == 1:
                    raise
                microbatch //= 2
                torch._dynamo.reset()
                torch.cuda.empty_cache()

    def train_with(self, precision, microbatch):
        s = self.shape
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
        if not self.tiny:
            for block in model.blocks:
                block.compile()
        tokens = torch.randint(s.vocab, (s.rows, s.length + 1), device=self.device)
        starts = torch.rand(s.rows, s.length, device=self.device) < 1 / s.document
        starts[:, 0] = True
        document_ids = starts.cumsum(1)
        at = torch.arange(s.length, device=self.device).expand_as(starts)
        positions = at - torch.where(starts, at, 0).cummax(1).values
        valid = torch.cat((document_ids[:, 1:] == document_ids[:, :-1], torch.ones_like(starts[:, :1])), 1)
        targets = torch.where(valid, tokens[:, 1:], -100)
        ids = document_ids[:microbatch].clone()
        masks = []
        for begin in range(0, s.rows, microbatch):
            ids.copy_(document_ids[begin : begin + microbatch])
            masks.append(self.block_masks(ids))

        def loss_of(x, y):
            return F.cross_entropy(x.flatten(0, 1).float(), y.flatten(), ignore_index=-100, reduction='sum')

        compiled_loss = self.compile(loss_of)

        def step(microbatches):
            count = valid[: microbatches * microbatch].sum()
            for i in range(microbatches):
                rows = slice(i * microbatch, (i + 1) * microbatch)
                ids.copy_(document_ids[rows])
                with torch.autocast(self.device, torch.bfloat16, enabled=precision == 'bf16'):
                    logits = model(tokens[rows, :-1], positions[rows], *masks[i])
                (compiled_loss(logits, targets[rows]) / count).backward()
                del logits
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        start = time.monotonic()
        step(1)
        self.synchronize()
        compile_seconds = time.monotonic() - start
        step(1)
        ms = self.time(lambda: step(s.rows // microbatch), 0, 2)
        rate = s.rows * s.length / statistics.median(ms) * 1e3
        memory = 0 if self.tiny else torch.cuda.max_memory_allocated()
        self.add('train', precision, ms, rows=s.rows, length=s.length, microbatch=microbatch, tokensPerSecond=rate,
                 memoryUsed=memory, firstStepSeconds=compile_seconds)

    def inference_model(self, precision):
        model = self.model(torch.bfloat16 if precision == 'bf16' else torch.float32).requires_grad_(False)
        # The angles stay FP32.
        model.table = Decoder(self.shape).table.to(self.device)
        return model

    def graphed(self, body):
        """The same work as a CUDA graph; `body` has run before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay

    @torch.no_grad()
    def prefill(self, precision, route, attention):
        s, n = self.shape, self.shape.prompt
        model = self.inference_model(precision)
        tokens = torch.randint(s.vocab, (1, n), device=self.device)
        for block in model.blocks if not self.tiny else ():
            block.compile(dynamic=route == 'exact')
        masks = {}

        def upper_mask(rows_in, rows_out):
            """Of the last rows_out queries over the global bank and the last rows_in local entries."""
            key = rows_in, rows_out
            if key not in masks:
                def seen(b, h, q, k):
                    at = torch.where(k < n, k, k - n + (n - rows_in))
                    p = q + (n - rows_out)
                    return (at <= p) & ((k < n) | (at > p - s.window))

                if attention == 'flex':
                    masks[key] = create_block_mask(seen, None, None, rows_out, n + rows_in, device=self.device)
                else:
                    q = torch.arange(rows_out, device=self.device).view(-1, 1)
                    masks[key] = seen(0, 0, q, torch.arange(n + rows_in, device=self.device).view(1, -1))
            return masks[key]

        def body():
            return model.prefill(tokens, route == 'exact', upper_mask)

        facts = {'route': route, 'batch': 1, 'length': n, 'attention': attention}
        self.add('prefill', precision, self.time(body, 3, self.repeats), **facts, graphs=False)
        if not self.tiny:
            self.add('prefill', precision, self.time(self.graphed(body), 2, self.repeats), **facts, graphs=True)

    @torch.no_grad()
    def decode(self, precision, batch):
        s = self.shape
        model = self.inference_model(precision)
        dtype = torch.bfloat16 if precision == 'bf16' else torch.float32
        for block in model.blocks:
            block.step = self.compile(block.step)
        slots = [s.prompt + s.steps] * (s.lower + 1) + [s.window] * s.upper
        cache = [tuple(torch.randn(batch, s.kv_heads, count, s.head_dim, dtype=dtype, device=self.device)
                       for _ in range(2)) for count in slots]
        token = torch.randint(s.vocab, (batch, 1), device=self.device)
        position = torch.tensor([s.prompt], device=self.device)

        def body():
            return model.decode(token, position, cache)

        facts = {'batch': batch, 'length': s.prompt}
        self.add('decode', precision, self.time(body, 3, 2 * self.repeats), **facts, graphs=False)
        if not self.tiny:
            self.add('decode', precision, self.time(self.graphed(body), 3, 2 * self.repeats), **facts, graphs=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out')
    parser.add_argument('--seconds', type=float, default=270)
    parser.add_argument('--only', default='train,prefill,decode')
    parser.add_argument('--microbatch', type=int, default=16)
    parser.add_argument('--tiny', action='store_true')
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit('torch_peer: PyTorch sees no CUDA device (--tiny is a trial on the CPU)')
    peer = Peer(options)
    only = options.only.split(',')
    plan = [('train bf16', lambda: peer.train('bf16'))]
    for precision in ('bf16', 'fp32'):
        for batch in (1, 8):
            plan.append((f'decode {precision} {batch}', lambda p=precision, b=batch: peer.decode(p, b)))
        for route in ('full', 'exact'):
            plan.append((f'prefill {precision} {route} sdpa', lambda p=precision, r=route: peer.prefill(p, r, 'sdpa')))
        if not peer.tiny:
            plan.append((f'prefill {precision} full flex', lambda p=precision: peer.prefill(p, 'full', 'flex')))
    plan.append(('train fp32', lambda: peer.train('fp32')))
    for what, body in plan:
        if what.split()[0] in only:
            peer.attempt(what, body)
    return 1 if peer.record['failures'] else 0


if __name__ == '__main__':
    sys.exit(main())
