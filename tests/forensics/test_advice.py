"""After a NaN: what can be changed, with its value now."""

from model_check.forensics.advice import advice
from tests.engine.conftest import make_settings


def test_it_names_the_values_of_now() -> None:
    settings = make_settings(training__learning_rate=2e-3, training__use_amp="true")
    assert advice(settings, is_fresh=True) == (
        "If the settings made it: lower training.learning_rate (0.002), model.init_std (0.02), "
        "training.max_grad_norm (1); training.use_amp=false (bf16); "
        "debug.dump_tensors=true, which also --debug sets, to see every tensor"
    )


def test_what_does_not_apply_is_not_advised() -> None:
    settings = make_settings(
        training__learning_rate=1e-3,
        training__use_amp="false",
        training__max_grad_norm="null",
        debug__dump_tensors="true",
    )
    assert advice(settings, is_fresh=False) == (
        "If the settings made it: lower training.learning_rate (0.001); "
        "training.max_grad_norm=1 (null)"
    )
    exact = make_settings(training__precision="fp16", training__use_amp="true")
    assert "; training.precision=fp32 (fp16); " in advice(exact, is_fresh=True)
