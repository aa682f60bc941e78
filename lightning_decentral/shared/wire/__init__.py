"""What all methods send: `transport` is the one door to torch.distributed, FSDP2 has the other; averages, agreement.

Public: `replicas`; all else serves the strategies.
"""
