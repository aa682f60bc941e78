"""Single-device models and data that know no strategy, and the command that trains them.

`train.py` is the command (`python recipes/train.py`, installed as `lightning-decentral-train`); `command.py` hands it
to `lightning-decentral`, which measures and plans. `vit.py`, `resnet.py` and `gpt.py` are the models; `digits.py`,
`pydoc_topics.py` and `hub.py` the data. What they share: `learner.py` (training, validation, test), `loaders.py`
(splits into equal batches), `schedules.py`, `augment.py` and `tokens.py`.

Every model and every data set is a file of its own, however short: it is what a user copies.
"""
