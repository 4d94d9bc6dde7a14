"""``make device``: capture on a device, plan wherever a solver is, execute on the device.

Three commands hand one folder on: ``python -m experiments.device capture|plan|execute FOLDER``. The device needs
Python, PyTorch and NumPy alone, so this package imports nothing else at its top; the machine that plans needs no
PyTorch. docs/how-to/measure-a-gpu.md says what to run.
"""
