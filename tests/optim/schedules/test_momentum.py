"""Test momentum schedules: of `momentum`, or of the first of `betas`."""


import pytest


def test_momentum_of_sgd_is_scheduled(make_wrapper, build, collect):
    wrapper = make_wrapper(0.1, momentum=0.8)
    chain = build(wrapper, {"type": "ConstantMomentum", "factor": 0.5, "end": 3})
    assert collect(wrapper, chain, 4, name="momentum") == [0.4, 0.4, 0.8, 0.8]


# MMEngine's betas[0] at the first four iterations of a warm-up to Adam's 0.9
def test_the_first_beta_is_scheduled_and_mirrored(make_wrapper, build):
    wrapper = make_wrapper(0.1, betas=(0.9, 0.99))
    (warmup,) = build(wrapper, {"type": "LinearMomentum", "start_factor": 0.5, "end": 3})
    seen = []
    for _ in range(4):
        seen.append(wrapper.param_groups[0]["betas"])
        assert wrapper.param_groups[0]["momentum"] == seen[-1][0]
        warmup.step()
    assert [beta for beta, _ in seen] == pytest.approx([0.45, 0.675, 0.9, 0.9], rel=1e-12)
    assert {beta2 for _, beta2 in seen} == {0.99}


def test_momentum_schedules_can_be_chained(make_wrapper, build):
    wrapper = make_wrapper(0.1, betas=(0.8, 0.99))
    build(wrapper, {"type": "ConstantMomentum", "factor": 0.5}, {"type": "ConstantMomentum", "factor": 0.5})
    assert wrapper.param_groups[0]["betas"] == (0.2, 0.99)


def test_the_learning_rate_does_not_change(make_wrapper, build):
    wrapper = make_wrapper(0.1, momentum=0.8)
    build(wrapper, {"type": "ConstantMomentum", "factor": 0.5})
    assert wrapper.param_groups[0]["lr"] == 0.1
