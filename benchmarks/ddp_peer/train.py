"""What a person writes who trains on several devices with torch's own parts: DDP, AdamW, a norm
that is clipped, a line a step. The model and its batches are this project's, so that losses can be
compared.

    torchrun --nproc-per-node=N train.py SETTINGS.json TOKEN_CACHE
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model_check.attention import sdpa
from model_check.config.load import Request, load
from model_check.config.shape import geometry
from model_check.data.read.loader import BatchLoader
from model_check.data.read.token_cache import TokenCache
from model_check.dist.ddp import SummedLoss
from model_check.init import build_model


def main(settings_file: str, cache_path: str) -> None:
    settings = load(Request(preset="cpu", config_file=Path(settings_file)), lambda: False).settings
    training = settings.training
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.system.seed)
    cache = TokenCache.open(Path(cache_path), settings.data.verify)
    shape = geometry(settings.model, cache.vocab_size)
    model = build_model(settings, shape, sdpa, torch.device("cpu"))
    ddp = DistributedDataParallel(SummedLoss(model))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        fused=True,
    )
    loader = BatchLoader(
        cache, training.batch_size, settings.system.seed, 1, rank=rank, num_ranks=size
    )
    stream, num_batches = loader.batches(), training.grad_accum_nums
    for step in range(training.max_steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(num_batches):
            batch = next(stream)
            is_last = number == num_batches - 1
            with nullcontext() if is_last else ddp.no_sync():
                loss = ddp(batch.inputs, batch.targets) / (batch.targets.numel() * num_batches)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm or 1.0)
        optimizer.step()
        dist.all_reduce(total)
        told = {"step": step, "t": time.monotonic_ns(), "loss": float(total) / size}
        if rank == 0:
            print(json.dumps(told | {"norm": float(norm)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
