"""The checks of ``python -m mindspeed_rl.doctor``, without torch: pure checks of gathered facts."""
