"""What ``python -m mindspeed_rl.doctor`` looks at, without torch: pure checks of gathered facts."""
