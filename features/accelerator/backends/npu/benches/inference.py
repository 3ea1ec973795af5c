"""ONNX Runtime from Python, beside which vm-npu is measured. For each line of standard input, what it is to do, a line: the time and the processor's, in ms.

    inference.py MODEL.onnx PLUGIN.so BLOB.onnx

`load` compiles the model and loads what was compiled, `cached` loads that again, `run` is an inference of what was loaded last.
"""
import os, sys, time
import numpy as np
import onnxruntime as ort

model, plugin, blob = sys.argv[1], sys.argv[2], sys.argv[3]
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


def compiled():
    ort.ModelCompiler(options(), model, embed_compiled_data_into_model=True).compile_to_file(blob)
    return ort.InferenceSession(blob, options())


def bound(session):
    binding = session.io_binding()
    for port in session.get_inputs():
        binding.bind_ortvalue_input(port.name, ort.OrtValue.ortvalue_from_numpy(np.ones(port.shape, np.float32)))
    for port in session.get_outputs():
        binding.bind_ortvalue_output(port.name, ort.OrtValue.ortvalue_from_numpy(np.zeros(port.shape, np.float32)))
    return binding


session = binding = None
for line in sys.stdin:
    what = line.strip()
    if what == "load":
        # Those of before end first, as they do on the other side.
        session = binding = None
        if os.path.exists(blob):
            os.remove(blob)
    elif what == "cached":
        session = binding = None
    elif binding is None:
        binding = bound(session)
    start, used = time.perf_counter(), time.process_time()
    if what == "load":
        session = compiled()
    elif what == "cached":
        session = ort.InferenceSession(blob, options())
    else:
        session.run_with_iobinding(binding)
    print((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3, flush=True)
