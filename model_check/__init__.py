"""The worker's world: settings, data, model, training, evidence. Import the submodule you need.

For programs of your own:

    import model_check
    model_check.__version__
    model = model_check.load_model(".checkpoints/gpu0/last.pt")  # a torch module, in eval mode
    logits = model(tokens)                                       # int64 [B, T] -> [B, T, V]
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imported when they are asked for: the launcher imports this package, and never torch."""
    match name:
        case "__version__":
            from model_check.utils.project_files import version

            return version()
        case "load_model":
            from model_check.library import load_model

            return load_model
        case "watch":
            from model_check.instrument.api import watch

            return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
