"""Messages of all methods: `transport` is the one door to torch.distributed, FSDP2 has the other, `in_process_group`
answers in its place; averages, agreement.

Public: `pipeline_replicas`; all else serves the strategies.
"""
