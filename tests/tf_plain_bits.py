"""Run by a test in a process of its own: a plan against the plain `tf.function` with its optimizers off."""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from orders import random_order
from tf_helpers import LOSS, batch_for, bits_of, convolutional, put_state, specs_of, state_of

from remat.tf.adapter import executed_as_written
from remat.tf.api import Objective
from remat.tf.capture import capture_step, trace
from remat.tf.emit import emit

keras.utils.set_random_seed(0)
model = convolutional()
batch = batch_for(model)
objective = Objective(model, LOSS)
function = trace(objective.step, specs_of(batch))
step = capture_step(function, "m", {}, objective.values[0], objective.gradients)
order = random_order(step.planned, np.random.default_rng(4), 0.1)
before = state_of(model.variables)
with executed_as_written():
    plain = bits_of(function(*batch), model.variables)
    put_state(model.variables, before)
    ours = bits_of(emit(step, step.epilogue.merged(order)).function()(*tf.nest.flatten(batch)), model.variables)
print(json.dumps({"same": plain == ours, "repeats": len(order) > len(step.planned)}))
