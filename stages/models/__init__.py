"""Models: their architecture, their files, and the policy, critic, reference and reward models that megatron-core runs.
No other folder imports megatron-core."""
