"""A plain loop: dropout, clipping, AdamW."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, TIME, WIDTH, VOCABULARY = 8, 4, 32, 64, 128

torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        heads = self.qkv(self.ln_1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(x)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.arange(1 << 14) * 7919 % 127
for step in range(STEPS):
    starts = torch.randint(len(text) - TIME - 1, (BATCH,)).tolist()
    rows = torch.stack([text[start : start + TIME + 1] for start in starts]).to(device)
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.6f}", flush=True)
