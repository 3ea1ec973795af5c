//! Models in their binary form: whatever a guest sends. What is valid has one meaning in bytes, and can be ONNX.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    if let Ok(graph) = vm_graph::decode(data)
        && let Ok(graph) = vm_graph::validate(graph)
    {
        let bytes = vm_graph::encode(&graph).expect("it was no longer before");
        assert_eq!(vm_graph::decode(&bytes).as_ref(), Ok(&*graph));
        let _ = vm_graph::onnx::model(&graph);
    }
});
