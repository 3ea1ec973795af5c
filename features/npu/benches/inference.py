"""ONNX Runtime from Python, beside which vm-npu is measured: times in ms, as JSON.

    inference.py MODEL.onnx PLUGIN.so BLOB.onnx ROUNDS
"""
import json, os, sys, time
import numpy as np
import onnxruntime as ort

model, plugin, blob, rounds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
NAME = "QNNExecutionProvider"
ort.set_default_logger_severity(4)
ort.register_execution_provider_library(NAME, plugin)
devices = [device for device in ort.get_ep_devices() if device.ep_name == NAME][:1]
OPTIONS = {"backend_type": "htp", "qnn_context_priority": "normal", "htp_performance_mode": "balanced", "soc_model": "60"}


def options():
    it = ort.SessionOptions()
    it.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    it.intra_op_num_threads = 1
    it.inter_op_num_threads = 1
    it.add_session_config_entry("session.intra_op.allow_spinning", "0")
    it.add_provider_for_devices(devices, OPTIONS)
    return it


def timed(f):
    start = time.perf_counter()
    result = f()
    return (time.perf_counter() - start) * 1e3, result


found = {"version": ort.__version__, "load": [], "cached": [], "run": []}
for _ in range(rounds):
    if os.path.exists(blob):
        os.remove(blob)

    def compiled():
        ort.ModelCompiler(options(), model, embed_compiled_data_into_model=True).compile_to_file(blob)
        return ort.InferenceSession(blob, options())

    found["load"].append(timed(compiled)[0])
    cached, session = timed(lambda: ort.InferenceSession(blob, options()))
    found["cached"].append(cached)
binding = session.io_binding()
for port in session.get_inputs():
    binding.bind_ortvalue_input(port.name, ort.OrtValue.ortvalue_from_numpy(np.ones(port.shape, np.float32)))
for port in session.get_outputs():
    binding.bind_ortvalue_output(port.name, ort.OrtValue.ortvalue_from_numpy(np.zeros(port.shape, np.float32)))
session.run_with_iobinding(binding)
for _ in range(20 * rounds):
    found["run"].append(timed(lambda: session.run_with_iobinding(binding))[0])
print(json.dumps(found))
