"""What telemetry said of one GPU during a run: values only."""

from typing import Annotated

from msgspec import Meta, Struct

from model_check.events import Trouble


class Health(Struct, frozen=True, kw_only=True):
    """One GPU during a run. None is "not told" (N/A); a count with `_new` rose so much during the
    run."""

    samples: int
    samples_loaded: int
    """Samples in which the GPU said that it was busy."""
    temperature_max_c: Annotated[int, Meta(ge=-(2**53), le=2**53)] | None
    memory_temperature_max_c: int | None
    power_mean_w: float | None
    power_max_w: float | None
    power_limit_w: float | None
    """The lowest that was in force."""
    power_default_limit_w: float | None = None
    sm_mean_mhz: float | None
    """While the GPU was busy; over the whole run where it does not say when it was."""
    sm_min_mhz: int | None = None
    """The slowest that lasted for several samples of a busy GPU, but for heat and power."""
    sm_max_mhz: int | None
    memory_mhz: int | None
    utilization_mean_percent: float | None
    memory_used_max_mib: int | None
    throttled_percent: dict[str, float] | None
    """Reason -> share of the samples in which the clocks were held back for it."""
    slowed_percent: dict[str, float]
    """Slowdown -> share of the run: by the counter of its time or by samples, whichever is more."""
    power_violation_percent: float | None
    thermal_violation_percent: float | None
    counted_s: float = 0.0
    """Between the first and the last counters."""
    ecc_corrected_new: int | None
    ecc_uncorrected_new: int | None
    """Both: since load or in the life of the board, whichever rose more."""
    ecc_corrected_total: int | None
    ecc_uncorrected_total: int | None
    """Both totals: in the life of the board."""
    remapped_corrected: int | None
    remapped_uncorrected: int | None
    remapped_new: int | None = None
    """Of both kinds."""
    remap_pending: bool | None
    remap_failed: bool | None
    pcie_gen: int | None
    """The fastest generation that was seen."""
    pcie_gen_min: int | None = None
    """The slowest that lasted for several samples under load."""
    pcie_max_gen: int | None
    pcie_width: int | None
    """The widest that was seen."""
    pcie_width_min: int | None = None
    """The narrowest that lasted for several samples under load."""
    pcie_max_width: int | None
    pcie_replays_new: int | None
    nvlink_errors_new: int | None
    xids: dict[int, int] | None
    """Xid -> how often it came; None: this driver tells none."""
    told_no_more: list[str]
    """Counters that could condemn the GPU and that NVML told at first, but not at the end."""
    trouble: list[Trouble]
    """What NVML could not tell, and why."""
