"""Times PyTorch's counterparts of two models: forward and backward of one batch of images.

Run as a program, by any Python that has PyTorch; it prints one JSON object, seconds by model:

    python torch_models.py '{"batch": 8, "image_size": 224, "rounds": 5}'

The models are written with PyTorch's own layers and have the operations of ours: a pre-norm vision
transformer of small size with fused attention, and ToST of small size with its convolutional stem
and two class-attention blocks. It imports nothing of this package.
"""

import itertools
import json
import statistics
import sys
import time

DIM, DEPTH, PATCH, CLASSES = 384, 12, 16, 1000


def vit_small(torch, image_size):
    """ViT-S/16 as timm has it: class token, learned positions, 6 heads."""
    nn = torch.nn
    tokens = (image_size // PATCH) ** 2 + 1

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.mlp = mlp(nn)

        def forward(self, x):
            heads = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, 6, DIM // 6)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.norm2(x))

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
            self.token = nn.Parameter(torch.zeros(1, 1, DIM))
            self.positions = nn.Parameter(torch.zeros(1, tokens, DIM))
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

        def forward(self, images):
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.blocks(x))[:, 0])

    return ViT()


def tost_small(torch, image_size):
    """ToST-S/16: token statistics with 8 heads, LayerScale, two class-attention blocks."""
    nn = torch.nn
    tokens = (image_size // PATCH) ** 2

    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.temperature = nn.Parameter(torch.ones(8, 1))

        def forward(self, x):
            w = self.w(x).reshape(*x.shape[:2], 8, DIM // 8).transpose(1, 2)
            shares = nn.functional.normalize(w, dim=-2).square().sum(-1)
            membership = torch.softmax(self.temperature * shares, dim=1)
            weights = membership / (membership.sum(-1, keepdim=True) + 1e-8)
            moments = torch.matmul(weights.unsqueeze(-2), w.square())
            out = -(w * membership.unsqueeze(-1)) / (1 + moments)
            return self.out(out.transpose(1, 2).reshape(x.shape))

    class ClassAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.out = (nn.Linear(DIM, n * DIM) for n in (1, 2, 1))

        def forward(self, x):
            q = self.q(x[:, :1]).reshape(len(x), 1, 8, -1).transpose(1, 2)
            k, v = self.kv(x).reshape(*x.shape[:2], 2, 8, -1).permute(2, 0, 3, 1, 4)
            token = nn.functional.scaled_dot_product_attention(q, k, v)
            token = self.out(token.transpose(1, 2).reshape(len(x), 1, DIM))
            return torch.cat([token, x[:, 1:]], 1)

    class Block(nn.Module):
        def __init__(self, attention, on_token_only):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.attention, self.mlp = attention, mlp(nn)
            self.gamma1, self.gamma2 = (nn.Parameter(torch.ones(DIM)) for _ in range(2))
            self.on_token_only = on_token_only

        def forward(self, x):
            x = x + self.gamma1 * self.attention(self.norm1(x))
            if not self.on_token_only:
                return x + self.gamma2 * self.mlp(self.norm2(x))
            x = self.norm2(x)
            token = x[:, :1] + self.gamma2 * self.mlp(x[:, :1])
            return torch.cat([token, 2 * x[:, 1:]], 1)

    class ToST(nn.Module):
        def __init__(self):
            super().__init__()
            widths, stem = [3, DIM // 8, DIM // 4, DIM // 2, DIM], []
            for index, (a, b) in enumerate(itertools.pairwise(widths)):
                stem += [nn.GELU()] if index else []
                stem += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b)]
            self.stem = nn.Sequential(*stem)
            self.positions = nn.Parameter(torch.zeros(1, tokens, DIM))
            blocks = (Block(Statistics(), on_token_only=False) for _ in range(DEPTH))
            self.blocks = nn.Sequential(*blocks)
            self.token = nn.Parameter(torch.zeros(1, 1, DIM))
            last = (Block(ClassAttention(), on_token_only=True) for _ in range(2))
            self.last = nn.Sequential(*last)
            self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

        def forward(self, images):
            x = self.stem(images).flatten(2).transpose(1, 2) + self.positions
            x = self.blocks(x)
            x = self.last(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
            return self.head(self.norm(x)[:, 0])

    return ToST()


def mlp(nn):
    """Two layers with the exact GELU."""
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


MODELS = {"vit_s16": vit_small, "tost_small_12": tost_small}


def measure(case):
    """Median seconds of forward, cross-entropy and backward, by model."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    size, batch = case["image_size"], case["batch"]
    images, labels = torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))
    seconds = {}
    for name, make in MODELS.items():
        model = make(torch, size).train()
        parameters = list(model.parameters())
        times = []
        for _ in range(case["rounds"] + 2):
            began = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            torch.autograd.grad(loss, parameters)
            times.append(time.perf_counter() - began)
        seconds[name] = statistics.median(times[2:])
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "seconds": seconds}


if __name__ == "__main__":
    json.dump(measure(json.loads(sys.argv[1])), sys.stdout)
