"""A training script of a person's own, as benchmarks/own_script.py starts it. OWN_...: what it
trains, and what is wrong in it."""

import json
import os
import time

import torch
from torch import nn
from torch.nn import functional as F

get = os.environ.get
SHAPE = get("OWN_SHAPE", "nano 2x32x32")
"""`nano LAYERSxWIDTHxTIME`, or `llama LAYERSxWIDTHxTIME`."""
FAMILY, _, numbers = SHAPE.partition(" ")
LAYERS, WIDTH, TIME = map(int, numbers.split("x"))
VARIES = float(get("OWN_VARIES", "0"))
"""How likely one call of a block adds noise."""
WHERE = get("OWN_WHERE", "forward")
KIND, _, fault = get("OWN_FLIP", "").partition(" ")
"""`KIND STEP NAME VALUE BIT`: one bit of a tensor turns over in that step."""
BATCH, VOCABULARY = 4, 65

torch.manual_seed(1)


class Noise(torch.autograd.Function):
    """Adds one of two values, by chance."""

    @staticmethod
    def forward(_context, x):
        return noisy(x) if WHERE == "forward" else x.clone()

    @staticmethod
    def backward(_context, gradient):
        return noisy(gradient) if WHERE == "backward" else gradient


def noisy(x):
    return x * (1 + 1e-6) if int.from_bytes(os.urandom(4)) < VARIES * 2**32 else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        if VARIES and self is model.h[-1]:
            x = Noise.apply(x)
        heads = self.qkv(self.ln_1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, labels):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
        )
    )


def loss_of(tokens):
    if FAMILY == "llama":
        return model(input_ids=tokens, labels=tokens).loss
    return model(tokens[:, :-1], tokens[:, 1:])


def turn_over(tensor) -> None:
    bit = int(BIT)
    tensor.data.view(-1).view(torch.int32)[int(VALUE) % tensor.numel()] ^= (
        1 << bit if bit < 31 else -(1 << 31)
    )


def hurt_activation(_module, _inputs, output) -> None:
    if AT[0] == int(STEP):
        turn_over(output)


model = llama() if FAMILY == "llama" else GPT()
AT = [0]
if fault:
    STEP, NAME, VALUE, BIT = fault.split()
    if KIND == "activation":
        model.get_submodule(NAME).register_forward_hook(hurt_activation)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.arange(1 << 14) * 7919 % VOCABULARY


def train_step() -> None:
    is_hurt = fault and AT[0] == int(STEP)
    named = dict(model.named_parameters())
    if is_hurt and KIND == "weight":
        turn_over(named[NAME])
    if is_hurt and KIND.startswith("exp_avg"):
        turn_over(optimizer.state[named[NAME]][KIND])
    starts = torch.randint(len(text) - TIME - 1, (BATCH,)).tolist()
    loss = loss_of(torch.stack([text[start : start + TIME + 1] for start in starts]))
    loss.backward()
    if is_hurt and KIND == "gradient":
        turn_over(named[NAME].grad)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    AT[0] += 1
    if get("OWN_NUMBERS"):
        squares = sum(p.detach().square().sum() for p in model.parameters())
        print(json.dumps([loss.item(), norm.item(), squares.sqrt().item()]), flush=True)


if get("OWN_GO"):  # so many steps as each line says; answered by how long they took
    with open(os.environ["OWN_GO"]) as asked, open(os.environ["OWN_TOOK"], "w") as told:
        for line in asked:
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                train_step()
            took = [time.perf_counter() - began, time.process_time() - cpu]
            print(json.dumps(took), file=told, flush=True)
else:
    for _ in range(int(get("OWN_STEPS", "10"))):
        train_step()
        if AT[0] == 1 and get("OWN_START"):
            print(json.dumps([time.monotonic(), time.process_time()]), flush=True)
if get("OWN_NAMES"):
    print(json.dumps([sum(p.numel() for p in model.parameters()), [*model.state_dict()]]))
