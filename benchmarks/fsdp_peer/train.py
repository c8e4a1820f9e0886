"""What a person writes who shares a model among devices with accelerate: its FSDP2, AdamW, a norm
that is clipped, a line a step. The model and its batches are this project's, so that losses can be
compared. It needs accelerate (pip install accelerate).

    torchrun --nproc-per-node=N train.py SETTINGS.json TOKEN_CACHE

accelerate 1.15 takes FSDP for GPUs and their like alone: on CPUs it would train by DDP, without a
word. Its type is set by hand here; everything behind that is its own.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch.distributed.fsdp import register_fsdp_forward_method

from model_check.attention import sdpa
from model_check.config.load import Request, load
from model_check.config.shape import geometry
from model_check.data.read.loader import BatchLoader
from model_check.data.read.token_cache import TokenCache
from model_check.init import build_model


def main(settings_file: str, cache_path: str) -> None:
    settings = load(Request(preset="cpu", config_file=Path(settings_file)), lambda: False).settings
    training, num_batches = settings.training, settings.training.grad_accum_nums
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.system.seed)
    accelerator = make_accelerator(num_batches)
    cache = TokenCache.open(Path(cache_path), settings.data.verify)
    shape = geometry(settings.model, cache.vocab_size)
    model = build_model(settings, shape, sdpa, torch.device("cpu"))
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
    model, optimizer = accelerator.prepare(model, optimizer)
    register_fsdp_forward_method(model, "summed_loss")
    loader = BatchLoader(
        cache, training.batch_size, settings.system.seed, 1, rank=rank, num_ranks=size
    )
    stream = loader.batches()
    for step in range(training.max_steps):
        total = torch.zeros(())
        for _ in range(num_batches):
            batch = next(stream)
            with accelerator.accumulate(model):
                loss = model.summed_loss(batch.inputs, batch.targets) / batch.targets.numel()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    most = training.max_grad_norm or 1.0
                    norm = accelerator.clip_grad_norm_(model.parameters(), most)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / num_batches
        dist.all_reduce(total)
        told = {"step": step, "t": time.monotonic_ns(), "loss": float(total) / size}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if rank == 0:
            print(json.dumps(told | {"norm": float(norm), "peak": peak}), flush=True)
    dist.destroy_process_group()


def make_accelerator(num_batches: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accumulation = GradientAccumulationPlugin(num_steps=num_batches, sync_each_batch=True)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_plugin=accumulation)
    AcceleratorState._shared_state |= {
        "distributed_type": DistributedType.FSDP,
        "fsdp_plugin": plugin,
    }
    return accelerator


if __name__ == "__main__":
    main(*sys.argv[1:])
