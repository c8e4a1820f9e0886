"""As the recipes of torchtune: bf16 autocast, gradient accumulation, activation checkpointing, a
compiled loss, a warm-up."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS, ACCUMULATION, BATCH, TIME, WIDTH, VOCABULARY = 6, 2, 2, 32, 64, 128

torch.manual_seed(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).reshape(x.shape))
        y = self.norm_2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.output(self.norm(x))


@torch.compile
def compute_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


model = Decoder()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
text = torch.arange(1 << 14) * 7919 % 127
for step in range(STEPS):
    total, num_tokens = 0.0, BATCH * TIME * ACCUMULATION
    for _ in range(ACCUMULATION):
        starts = torch.randint(len(text) - TIME - 1, (BATCH,)).tolist()
        rows = torch.stack([text[start : start + TIME + 1] for start in starts]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = compute_loss(logits, rows[:, 1:])
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        parameter.grad /= num_tokens
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {total / num_tokens:.6f}", flush=True)
