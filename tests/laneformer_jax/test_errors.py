import warnings

import pytest

from laneformer_jax.errors import UserError, nearest, warn_of_misspellings


def test_nearest_suggests_the_closest_name_whatever_its_case():
    assert nearest("hiden_size", ["hidden_size", "head_dim"]) == " (did you mean 'hidden_size'?)"
    assert nearest("LANE", ["lane", "replicate"]) == " (did you mean 'lane'?)"


def test_nearest_is_silent_when_nothing_is_close():
    assert nearest("zzz", ["hidden_size"]) == ""
    assert nearest("x", []) == ""


def test_user_error_is_a_value_error_with_its_message():
    error = UserError("steps: 0 must be positive")
    assert isinstance(error, ValueError)
    assert str(error) == "steps: 0 must be positive"


def test_misspelt_names_are_warned_of_and_others_names_are_not():
    known = ["broadcast_delay", "num_lanes", "norm_eps", "pad_token_id"]
    foreign = ["rms_norm_eps", "sep_token_id", "architectures", "num_lanes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_misspellings(foreign, known, "config.json")
    for name, right in (("broadcast_dely", "broadcast_delay"), ("Num_Lane", "num_lanes")):
        told = (
            rf"^config.json: '{name}' is not known and has no effect \(did you mean '{right}'\?\)$"
        )
        with pytest.warns(UserWarning, match=told):
            warn_of_misspellings([name], known, "config.json")
