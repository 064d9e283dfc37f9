"""Architecture and files of models, and the policy, critic, reference and reward models, which megatron-core runs. Only
this folder imports megatron-core."""
