"""Run by a test in a process of its own: a plan against the plain `tf.function` with its optimizers off."""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from orders import random_order

from remat.tf.adapter import executed_as_written
from remat.tf.api import Objective
from remat.tf.capture import capture_step, trace
from remat.tf.emit import emit
from tests.test_tf_execution import LOSS, _batch, _bits, _put, _specs, _state, convolutional

keras.utils.set_random_seed(0)
model = convolutional()
batch = _batch(model)
objective = Objective(model, LOSS)
function = trace(objective.step, _specs(batch))
step = capture_step(function, "m", {}, objective.values[0], objective.gradients)
order = random_order(step.planned, np.random.default_rng(4), 0.1)
before = _state(model.variables)
with executed_as_written():
    plain = _bits(function(*batch), model.variables)
    _put(model.variables, before)
    ours = _bits(emit(step, step.epilogue.merged(order)).function()(*tf.nest.flatten(batch)), model.variables)
print(json.dumps({"same": plain == ours, "repeats": len(order) > len(step.planned)}))
