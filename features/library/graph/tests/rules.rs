//! What is refused, and by which words.

use proptest::prelude::*;
use vm_graph::{
    Builder, Convolution, Element, Graph, GraphError, Input, Node, Op, Output, Pool, Pooling, Reduction,
    Tensor, TensorType, Value, decode, encode, onnx, validate,
};

/// Builds on inputs `a` f32[2, 3], `b` f32[4], `i` i32[2], `t` bool[2]; expects an error with such words.
fn check(build: impl Fn(&mut Builder, [Value; 4]) -> Result<Value, GraphError>, words: &str) {
    let mut builder = Builder::new("graph");
    let inputs = [
        builder.input("a", Element::F32, &[2, 3]).unwrap(),
        builder.input("b", Element::F32, &[4]).unwrap(),
        builder.input("i", Element::I32, &[2]).unwrap(),
        builder.input("t", Element::Bool, &[2]).unwrap(),
    ];
    let error = build(&mut builder, inputs).expect_err(words).to_string();
    assert!(error.contains(words), "{error:?} does not say {words:?}");
}

#[test]
fn operations() {
    check(
        |g, [a, b, ..]| g.add(a, b),
        "operation 0 (add): f32[2, 3] and f32[4] do not have the same extents",
    );
    check(|g, [a, _, i, _]| g.add(a, i), "different elements");
    check(|g, [.., t]| g.add(t, t), "it takes numbers, and bool[2] is none");
    check(|g, [_, _, i, _]| g.div(i, i), "floats");
    check(|g, [_, _, i, _]| g.exp(i), "operation 0 (exp)");
    check(|g, [a, ..]| g.not(a), "truth values");
    check(|g, [a, ..]| g.and(a, a), "truth values");
    check(|g, [a, _, i, _]| g.select(i, a, a), "truth values");
    check(|g, [a, ..]| g.mat_mul(a, a), "no product");
    check(|g, [a, b, ..]| g.mat_mul(a, b), "no matrix");
    check(|g, [a, ..]| g.transpose(a, &[0, 0]), "each dimension");
    check(|g, [a, ..]| g.transpose(a, &[0, 9]), "each dimension");
    check(|g, [a, ..]| g.reshape(a, &[4]), "other elements");
    check(|g, [a, ..]| g.reshape(a, &[u64::MAX, u64::MAX]), "other elements");
    check(|g, [a, ..]| g.expand(a, &[2, 1]), "repeated");
    check(|g, [a, b, ..]| g.concat(&[a, b], 0), "put behind");
    check(|g, _| g.concat(&[], 0), "one value at least");
    check(|g, [a, ..]| g.slice(a, 1, 2, 4), "there is no 2..4");
    check(|g, [a, ..]| g.slice(a, 2, 0, 1), "dimensions");
    check(|g, [a, ..]| g.slice_by(a, 0, 0, 1, 0), "by 0");
    check(|g, [a, ..]| g.pad(a, &[0, u64::MAX], &[0, 0]), "too many elements");
    check(|g, [a, b, ..]| g.gather(a, b, 0), "indices");
    check(|g, [a, _, i, _]| g.gather(a, i, 2), "no dimension 2");
    check(|g, [a, _, i, _]| g.gather_elements(a, i, 0), "reaches beyond");
    check(|g, [a, _, i, _]| g.scatter_rows(a, i, i, false), "different elements");
    check(|g, [a, b, i, _]| g.scatter_rows(b, i, a, false), "is not a row");
    check(|g, [a, ..]| g.reduce(Reduction::Sum, a, &[]), "increasing order");
    check(|g, [a, ..]| g.reduce(Reduction::Sum, a, &[1, 0]), "increasing order");
    check(|g, [a, ..]| g.reduce(Reduction::Sum, a, &[2]), "no dimension 2");
    check(|g, [_, b, ..]| Ok(g.top_k(b, 0, 5)?[0]), "of which to take 5");
    check(|g, [_, b, ..]| Ok(g.top_k(b, 0, 0)?[0]), "no elements");
    check(|g, [a, b, ..]| g.layer_norm(a, b, b, 1e-5), "not one for each");
    check(|g, [_, b, ..]| g.layer_norm(b, b, b, f64::NAN), "ε is NaN");
    check(|g, [_, b, ..]| g.layer_norm(b, b, b, 1e300), "it is an f32");
    check(|g, [a, b, ..]| g.quantize(a, b, b, None), "u8, i8");
    check(|g, [a, b, ..]| g.convolution(Convolution::default(), a, b, None), "channels");
    check(|g, [a, ..]| g.add(a, Value(99)), "value 99 is not defined");
    check(
        |g, [a, ..]| g.input("x", Element::F32, &[1]).and(g.neg(a)).and(g.input("y", Element::F32, &[1])),
        "come before",
    );
    check(|g, _| g.input("a b", Element::F32, &[1]), "is no name");
    // No more of it is told than a name can have, wherever its letters begin.
    let long = format!("a{}", "é".repeat(1000));
    check(move |g, _| g.input(&long, Element::F32, &[1]), &format!("\"a{}\" is no name", "é".repeat(63)));
    check(|g, _| g.input("x", Element::F32, &[0]), "no elements");
    check(|g, _| g.input("x", Element::F32, &[1; 9]), "dimensions");
    let short = Tensor { ty: TensorType::new(Element::F32, &[2]), bytes: vec![0; 7] };
    check(move |g, _| g.constant(short.clone()), "7 bytes of 8");
    let maybe = Tensor { ty: TensorType::new(Element::Bool, &[1]), bytes: vec![2] };
    check(move |g, _| g.constant(maybe.clone()), "a byte of 0 or 1");
    let image = |g: &mut Builder, a| g.reshape(a, &[1, 1, 2, 3]);
    let pool = |window, strides, pads| Pool { how: Pooling::MaxPool, window, strides, pads };
    check(
        |g, [a, ..]| image(g, a).and_then(|x| g.pool(pool([3, 1], [1; 2], [[0; 2]; 2]), x)),
        "do not go over",
    );
    check(|g, [a, ..]| image(g, a).and_then(|x| g.pool(pool([1, 1], [0, 1], [[0; 2]; 2]), x)), "by 0");
    // What providers count in 32 bits, and what no window needs.
    let wide = pool([1 << 40, 1], [1; 2], [[1 << 39, 1 << 39], [0; 2]]);
    check(move |g, [a, ..]| image(g, a).and_then(|x| g.pool(wide, x)), "a window reaches over 1099511627776");
    let convolve = |how: Convolution, words: &str| {
        let of = move |g: &mut Builder, a| {
            let x = image(g, a)?;
            let weight = g.slice(x, 3, 0, 2)?;
            g.convolution(how, x, weight, None)
        };
        check(move |g, [a, ..]| of(g, a), words);
    };
    let how = Convolution::default();
    convolve(Convolution { pads: [[2, 0], [0; 2]], ..how }, "padding is less than a window");
    convolve(Convolution { pads: [[0; 2], [0, u64::MAX]], ..how }, "padding is less than a window");
    convolve(Convolution { dilations: [1, u64::MAX], ..how }, "a window reaches over");
    convolve(Convolution { dilations: [0, 1], ..how }, "do not go over");
    check(
        |g, [a, ..]| image(g, a).and_then(|x| g.pool(pool([1, 1], [1, 1], [[1, 0], [0; 2]]), x)),
        "less than a window",
    );
    check(
        |g, [a, ..]| image(g, a).and_then(|x| g.pool(pool([0, 1], [1, 1], [[0; 2]; 2]), x)),
        "do not go over",
    );
}

#[test]
fn whole_graphs() {
    let input = |name: &str| Input { name: name.to_owned(), ty: TensorType::new(Element::F32, &[1]) };
    let output = |name: &str, value| Output { name: name.to_owned(), value: Value(value) };
    let graph = |inputs: &[&str], outputs: &[(&str, u32)]| Graph {
        name: "graph".to_owned(),
        inputs: inputs.iter().map(|name| input(name)).collect(),
        nodes: Vec::new(),
        outputs: outputs.iter().map(|(name, value)| output(name, *value)).collect(),
    };
    let check = |graph: Graph, words: &str| {
        let error = validate(graph).expect_err(words).to_string();
        assert!(error.contains(words), "{error:?} does not say {words:?}");
    };
    check(graph(&["x"], &[]), "no outputs");
    check(graph(&["x"], &[("y", 1)]), "no value 1");
    check(graph(&["x", "x"], &[("y", 0)]), "are called x");
    check(graph(&["x"], &[("x", 0)]), "are called x");
    check(Graph { name: String::new(), ..graph(&["x"], &[("y", 0)]) }, "is no name");
    check(Graph { name: "é".repeat(40), ..graph(&["x"], &[("y", 0)]) }, "is no name");
    let itself = Node { op: Op::MatMul, operands: vec![Value(1), Value(0)] };
    check(Graph { nodes: vec![itself], ..graph(&["x"], &[("y", 0)]) }, "value 1 is not defined before it");
    assert!(validate(graph(&["x"], &[("y", 0)])).is_ok());
    // What is too much is refused while it is read, before it takes memory.
    let many = |nodes: usize| {
        let nothing = Node { op: Op::MatMul, operands: Vec::new() };
        let graph = Graph { nodes: vec![nothing; nodes], ..graph(&["x"], &[("y", 0)]) };
        decode(&encode(&graph).unwrap()).map(|graph| graph.nodes.len())
    };
    assert_eq!(many(1 << 16), Ok(1 << 16));
    assert!(matches!(many((1 << 16) + 1), Err(GraphError::Binary(_))));
    let ranked = Graph {
        inputs: vec![Input { name: "x".to_owned(), ty: TensorType::new(Element::F32, &[1; 9]) }],
        ..graph(&[], &[("y", 0)])
    };
    assert!(matches!(decode(&encode(&ranked).unwrap()), Err(GraphError::Binary(_))));
    for bytes in [&b""[..], b"\0vgr", b"\0vgr\x02\0", b"\0vgr\x01\0", b"ONNX"] {
        assert!(matches!(decode(bytes), Err(GraphError::Binary(_))), "{bytes:?}");
    }
}

/// A graph with every kind of attribute.
fn seed() -> Vec<u8> {
    let mut b = Builder::new("seed");
    let x = b.input("x", Element::F32, &[1, 2, 4, 4]).unwrap();
    let weight = Tensor::from_f64s(Element::F32, &[2, 2, 1, 1], &[1.0, 2.0, 3.0, 4.0]);
    let weight = b.constant(weight).unwrap();
    let y = b.convolution(Convolution::default(), x, weight, None).unwrap();
    let pool = Pool { how: Pooling::MaxPool, window: [2, 2], strides: [2, 2], pads: [[0; 2]; 2] };
    let y = b.pool(pool, y).unwrap();
    let y = b.reshape(y, &[2, 4]).unwrap();
    let [y, at] = b.top_k(y, 1, 2).unwrap();
    let y = b.gather_elements(y, at, 1).unwrap();
    let y = b.reduce(Reduction::Sum, y, &[0]).unwrap();
    b.output("y", y).unwrap();
    encode(&b.finish().unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Bytes that were changed: what is still a valid graph has one meaning in bytes, and can be a model.
    #[test]
    fn changed_bytes(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4)) {
        let mut bytes = seed();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(graph) = decode(&bytes)
            && let Ok(graph) = validate(graph)
        {
            let again = decode(&encode(&graph).unwrap()).unwrap();
            prop_assert_eq!(&again, &*graph);
            prop_assert!(!onnx::model(&graph).is_empty());
        }
    }
}
