from laneformer_jax.errors import UserError, nearest


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
