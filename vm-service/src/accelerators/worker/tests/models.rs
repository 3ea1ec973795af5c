//! Models on an NPU that computes them by definition.

use std::sync::atomic::{AtomicU32, Ordering};

use vm_graph::{Builder, Element, Graph, GraphError, Tensor, ValidGraph};

use super::*;
use crate::accelerators::worker::server::Failure;
use crate::accelerators::worker::server::models::{Model, Models};

/// The NPU, with what its library does instead.
#[derive(Default)]
struct ByDefinition {
    /// Inferences from here on take too long; the library ends them, or does not.
    late: AtomicU32,
    turn: Arc<Mutex<()>>,
}

/// What [`ByDefinition::late`] is.
const IN_TIME: u32 = 0;
const STOPPED: u32 = 1;
const STUCK: u32 = 2;

struct Evaluated {
    npu: Arc<ByDefinition>,
    graph: ValidGraph,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

/// What a compiled model takes here.
const COMPILED: u64 = 1000;

struct Handle(Arc<ByDefinition>);

impl Models for Handle {
    fn name(&self) -> &str {
        "an evaluator"
    }

    fn target(&self) -> &str {
        "f64"
    }

    fn turn(&self) -> Arc<Mutex<()>> {
        self.0.turn.clone()
    }

    fn compile(&self, graph: &ValidGraph) -> Result<Box<dyn Model>, Failure> {
        assert!(self.0.turn.try_lock().is_err(), "it is not its turn");
        if graph.name == "refused" {
            return Err((Status::Module, "it is called so".into()));
        }
        let zeros =
            |ty: &vm_graph::TensorType| Tensor { ty: ty.clone(), bytes: vec![0; ty.bytes() as usize] };
        let outputs = (0..graph.outputs.len()).map(|number| zeros(graph.output_type(number))).collect();
        let inputs = graph.inputs.iter().map(|input| zeros(&input.ty)).collect();
        Ok(Box::new(Evaluated { npu: self.0.clone(), graph: graph.clone(), inputs, outputs }))
    }
}

impl Model for Evaluated {
    fn bytes(&self) -> u64 {
        COMPILED
    }

    fn inputs(&mut self) -> Result<Vec<&mut [u8]>, Failure> {
        Ok(self.inputs.iter_mut().map(|tensor| &mut *tensor.bytes).collect())
    }

    fn run(&mut self, limit: Duration) -> Result<(), Failure> {
        assert!(self.npu.turn.try_lock().is_err(), "it is not its turn");
        match self.npu.late.load(Ordering::Relaxed) {
            STOPPED => return Err((Status::Deadline, format!("it took longer than {limit:?}"))),
            STUCK => return Err((Status::Lost, "it does not end".into())),
            _ => {}
        }
        let inputs: Vec<_> = self.inputs.iter().map(Tensor::to_f64s).collect();
        let found = vm_graph::evaluate(&self.graph, &inputs);
        let found = found.map_err(|error| (Status::Device, error.to_string()))?;
        for (output, values) in self.outputs.iter_mut().zip(found) {
            *output = Tensor::from_f64s(output.ty.element, &output.ty.extents, &values);
        }
        Ok(())
    }

    fn outputs(&self) -> Vec<&[u8]> {
        self.outputs.iter().map(|tensor| &*tensor.bytes).collect()
    }
}

fn bench() -> (Bench, Arc<ByDefinition>) {
    let npu = Arc::new(ByDefinition::default());
    let compiler = Compiler::Models(Arc::new(Handle(npu.clone())));
    (Bench::on(Arc::new(FakeAccelerator::with_memory(4 << 20)), compiler), npu)
}

fn graph(build: impl FnOnce(&mut Builder) -> Result<(), GraphError>) -> Graph {
    let mut graph = Builder::new("test");
    build(&mut graph).unwrap();
    graph.finish().unwrap().into_inner()
}

fn bytes(graph: &Graph) -> Vec<u8> {
    vm_graph::encode(graph).unwrap()
}

/// `y = a + b`, of 4 × 4 floats, and whether a is less than b.
fn add() -> Graph {
    graph(|graph| {
        let a = graph.input("a", Element::F32, &[4, 4])?;
        let b = graph.input("b", Element::F32, &[4, 4])?;
        let y = graph.add(a, b)?;
        let less = graph.less(a, b)?;
        graph.output("y", y)?;
        graph.output("less", less)
    })
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The arguments of [`add`]: a at 0 and b at 64 of a buffer, y and less in another.
fn arguments() -> [Argument; 4] {
    [
        Argument::view(1, 0, &[4, 4]).unwrap(),
        Argument::view(1, 64, &[16]).unwrap(),
        Argument::view(2, 0, &[4, 4]).unwrap(),
        Argument::view(2, 64, &[4, 4]).unwrap(),
    ]
}

#[test]
fn a_model_reads_and_writes_buffers() {
    let (mut bench, _) = bench();
    let numbers = floats((0..32).map(|number| number as f32));
    bench.ram.write_all_at(&numbers, 0x2000).unwrap();
    let model = bytes(&add());
    bench.check(
        |batch| {
            batch.create_module(7, &model)?;
            batch.import_buffer(3, &[page(3)])?;
            batch.create_buffer(1, 128)?;
            batch.copy((1, 0), (3, 0), 128)?;
            batch.import_buffer(2, &[page(5)])?;
            // What came before has been done, and what comes behind finds what it wrote.
            batch.launch(7, 0, [1; 3], &arguments())?;
            batch.copy((3, 0), (2, 0), 128)?;
            batch.fence()
        },
        Ok(()),
    );
    let expect = [floats((0..16).map(|number| (2 * number + 16) as f32)), vec![1; 16], vec![0; 48]].concat();
    for at in [0x4000, 0x2000] {
        let mut got = vec![0; 128];
        bench.ram.read_exact_at(&mut got, at).unwrap();
        assert_eq!(got, expect, "{at:#x}");
    }
    let reply = bench.run(|batch| batch.query());
    let (_, answer) = Reply::decode(&reply).unwrap().results().next().unwrap().unwrap();
    let info = Info::decode(answer).unwrap();
    assert_eq!((info.name, info.target, info.grid), ("an evaluator", "f64", [1; 3]));
    // The graph, its arrays, and what it was compiled to are of the guest's memory.
    let held = model.len() as u64 + 3 * 64 + 16 + COMPILED + 128;
    assert_eq!(info.memory_bytes - info.memory_free, held);
    bench.check(
        |batch| {
            batch.destroy_module(7)?;
            batch.destroy_buffer(1)?;
            batch.create_buffer(1, QUOTA)
        },
        Ok(()),
    );
}

#[test]
fn code_may_lie_in_a_buffer() {
    let (mut bench, _) = bench();
    let model = bytes(&add());
    let len = model.len() as u64;
    bench.ram.write_all_at(&model, 0x2010).unwrap();
    let span = |buffer, offset, bytes| Span { buffer, offset, bytes };
    bench.check(
        |batch| {
            batch.import_buffer(3, &[page(3)])?;
            batch.create_buffer(4, 4096)?;
            batch.copy((4, 8), (3, 0x10), len)?;
            // It is what the copy before it made of the buffer, and a copy itself.
            batch.create_module_from(1, span(4, 8, len))?;
            batch.fill(span(4, 0, 4096), 0)?;
            batch.create_module_from(2, span(3, 0x10, len))?;
            batch.destroy_buffer(4)?;
            batch.create_buffer(1, 128)?;
            batch.create_buffer(2, 128)?;
            batch.launch(1, 0, [1; 3], &arguments())?;
            batch.launch(2, 0, [1; 3], &arguments())?;
            batch.fence()
        },
        Ok(()),
    );
    let cases = [
        (1, span(3, 0x10, len), Status::NumberTaken),
        (5, span(9, 0, len), Status::NoSuch),
        (5, span(3, 4090, len), Status::Range),
        (5, span(3, u64::MAX, 2), Status::Range),
        (5, span(3, 0x10, len - 1), Status::Module),
        (5, span(3, 0x10, 0), Status::Module),
    ];
    for (number, source, expect) in cases {
        bench.check(|batch| batch.create_module_from(number, source), Err((0, expect)));
    }
    let mut kernels = Bench::new();
    let ir = add_and_spin();
    kernels.ram.write_all_at(&ir, 0x2000).unwrap();
    kernels.check(
        |batch| {
            batch.import_buffer(3, &[page(3)])?;
            batch.create_module_from(1, span(3, 0, ir.len() as u64))?;
            batch.launch(1, 1, [1; 3], &[Argument::view(3, 2048, &[1])?, Argument::i64(1)])?;
            batch.fence()
        },
        Ok(()),
    );
    // What failed before is told here, as by a fence.
    kernels.check(
        |batch| {
            batch.launch(1, 1, [1; 3], &[Argument::view(3, 2048, &[1])?, Argument::i64(i64::MAX)])?;
            batch.create_module_from(2, span(3, 0, ir.len() as u64))
        },
        Err((1, Status::Deadline)),
    );
    kernels.check(|batch| batch.create_module_from(2, span(3, 0, ir.len() as u64)), Ok(()));
}

/// What is wrong with a module, and what the log says.
fn check_module(module: &[u8], expect: Status, text: &str) {
    let (mut bench, _) = bench();
    let reply = bench.run(|batch| batch.create_module(1, module));
    assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, expect)), "{text}");
    let log = bench.log().concat();
    assert!(log.starts_with("module 1: ") && log.contains(text), "{log}");
    // Nothing is held, and the number is free.
    bench.check(|batch| batch.create_buffer(1, QUOTA), Ok(()));
    bench.check(|batch| batch.launch(1, 0, [1; 3], &[]), Err((0, Status::NoSuch)));
}

#[test]
fn what_is_no_model_is_refused_with_a_reason() {
    use Status::{Module, Quota};
    let good = bytes(&add());
    for end in 0..good.len() {
        let text = if end < 4 { "an NPU runs models alone" } else { "these bytes are no graph" };
        check_module(&good[..end], Module, text);
    }
    check_module(&add_and_spin(), Module, "(`device = \"cpu\"`) for kernels");
    check_module(&[&good[..], &[0]].concat(), Module, "there is something behind it");
    let mut version = good.clone();
    version[4] = 9;
    check_module(&version, Module, "another version");
    let refused = Graph { name: "refused".into(), ..add() };
    check_module(&bytes(&refused), Module, "it is called so");
    let mut undefined = add();
    undefined.nodes[0].operands[0].0 = 1000;
    check_module(&bytes(&undefined), Module, "value 1000 is not defined before it");
    let unary = |extents: &[u64]| {
        graph(|graph| {
            let x = graph.input("x", Element::F32, extents)?;
            let y = graph.neg(x)?;
            graph.output("y", y)
        })
    };
    let mut huge = unary(&[2]);
    huge.inputs[0].ty.extents = vec![u64::MAX, u64::MAX, 2];
    check_module(&bytes(&huge), Module, "too many elements");
    huge.inputs[0].ty.extents = vec![0];
    check_module(&bytes(&huge), Module, "it has no elements");
    check_module(&bytes(&unary(&[1 << 31])), Quota, "operation 0 (neg) gives f32[2147483648]");
    check_module(&bytes(&unary(&[150_000])), Quota, "it holds 0");
    // Small at both ends.
    let within = graph(|graph| {
        let x = graph.input("x", Element::F32, &[1])?;
        let wide = graph.expand(x, &[1 << 30])?;
        let y = graph.slice(wide, 0, 0, 1)?;
        graph.output("y", y)
    });
    check_module(&bytes(&within), Quota, "operation 0 (");
    let ports = graph(|graph| {
        for number in 0..64 {
            graph.input(&format!("x{number}"), Element::F32, &[1])?;
        }
        let x = graph.input("x", Element::F32, &[1])?;
        graph.output("y", x)
    });
    check_module(&bytes(&ports), Module, "a launch has 64 arguments at most");
}

#[test]
fn arguments_must_be_the_models() {
    let (mut bench, npu) = bench();
    let (model, kernels) = (bytes(&add()), add_and_spin());
    let truth = bytes(&graph(|graph| {
        let x = graph.input("x", Element::Bool, &[4])?;
        let y = graph.not(x)?;
        graph.output("y", y)
    }));
    bench.check(
        |batch| {
            batch.create_module(1, &model)?;
            batch.create_module(2, &truth)?;
            batch.create_buffer(1, 128)?;
            batch.create_buffer(2, 128)?;
            batch.fill(Span { buffer: 1, offset: 0, bytes: 4 }, 2)
        },
        Ok(()),
    );
    bench.check(|batch| batch.create_module(3, &kernels), Err((0, Status::Module)));
    let with = |place: usize, argument| {
        let mut arguments = arguments().to_vec();
        arguments[place] = argument;
        arguments
    };
    let view = |buffer, offset, extents: &[u64]| Argument::view(buffer, offset, extents).unwrap();
    let rows = Argument::strided(1, 0, &[4, 4], &[16]).unwrap();
    let all = arguments().to_vec();
    let bools = |buffer| vec![view(1, 0, &[4]), view(buffer, 4, &[4])];
    type Case<'a> = (u32, u32, [u32; 3], u64, Vec<Argument>, Status, &'a str);
    let cases: Vec<Case<'_>> = vec![
        (9, 0, [1; 3], 0, all.clone(), Status::NoSuch, "no module 9"),
        (1, 1, [1; 3], 0, all.clone(), Status::NoSuch, "no kernel 1"),
        (1, 0, [2, 1, 1], 0, all.clone(), Status::Arguments, "one block"),
        (1, 0, [1, 1, 0], 0, all.clone(), Status::Arguments, "one block"),
        (1, 0, [1; 3], 1, all.clone(), Status::Arguments, "no fuel"),
        (1, 0, [1; 3], 0, vec![], Status::Arguments, "is given 0 arguments"),
        (1, 0, [1; 3], 0, all[..3].to_vec(), Status::Arguments, "2 inputs and 2 outputs, and is given 3"),
        (1, 0, [1; 3], 0, [&all[..], &all[..1]].concat(), Status::Arguments, "is given 5 arguments"),
        (
            1,
            0,
            [1; 3],
            0,
            with(0, Argument::f32(1.0)),
            Status::Arguments,
            "argument 0 is a, f32[4, 4]; it is a scalar",
        ),
        (1, 0, [1; 3], 0, with(1, rows), Status::Arguments, "it has strides"),
        (1, 0, [1; 3], 0, with(2, view(2, 0, &[2, 8])), Status::Arguments, "its extents are [2, 8]"),
        (1, 0, [1; 3], 0, with(3, view(2, 0, &[4])), Status::Arguments, "argument 3 is less, bool[4, 4]"),
        (1, 0, [1; 3], 0, with(0, view(1, 0, &[u64::MAX])), Status::Arguments, "or of [16]"),
        (1, 0, [1; 3], 0, with(0, view(9, 0, &[16])), Status::NoSuch, "no buffer 9"),
        (1, 0, [1; 3], 0, with(0, view(1, 65, &[16])), Status::Range, "64 bytes at 65"),
        (1, 0, [1; 3], 0, with(2, view(2, u64::MAX, &[16])), Status::Range, "64 bytes at"),
        (2, 0, [1; 3], 0, bools(1), Status::Arguments, "neither 0 nor 1"),
    ];
    for (module, kernel, grid, fuel, arguments, expect, text) in cases {
        let reply = bench.run(|batch| {
            batch.launch_with_fuel(module, kernel, grid, fuel, &arguments)?;
            batch.fence()
        });
        assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, expect)), "{text}");
        let log = bench.log().concat();
        assert!(log.contains(text), "{log} has no {text}");
    }
    // An inference that is too long is over, and the next one runs.
    let launch = |batch: &mut BatchWriter<'_>| batch.launch(1, 0, [1; 3], &arguments());
    npu.late.store(STOPPED, Ordering::Relaxed);
    bench.check(launch, Err((0, Status::Deadline)));
    npu.late.store(IN_TIME, Ordering::Relaxed);
    bench.check(launch, Ok(()));
    // Both ways in one buffer: all is read before anything is written.
    let same = [view(1, 0, &[16]), view(1, 64, &[16]), view(1, 32, &[16]), view(1, 96, &[16])];
    bench.check(|batch| batch.launch(1, 0, [1; 3], &same), Ok(()));
    // What is used by an inference is freed behind it.
    bench.check(
        |batch| {
            launch(batch)?;
            batch.destroy_buffer(1)?;
            batch.destroy_module(1)?;
            batch.create_buffer(1, 128)?;
            batch.fence()
        },
        Ok(()),
    );
    bench.check(launch, Err((0, Status::NoSuch)));
}

#[test]
fn a_library_that_does_not_end_breaks_the_guest() {
    let (mut bench, npu) = bench();
    let model = bytes(&add());
    bench.check(
        |batch| {
            batch.create_module(1, &model)?;
            batch.create_buffer(1, 128)?;
            batch.create_buffer(2, 128)
        },
        Ok(()),
    );
    npu.late.store(STUCK, Ordering::Relaxed);
    let executed = bench.execute(MAX_REPLY_BYTES, |batch| {
        batch.fence()?;
        batch.launch(1, 0, [1; 3], &arguments())?;
        batch.fence()
    });
    assert_eq!(executed.lost.as_deref(), Some("it does not end"));
    let reply = finish(executed).encode(MAX_REPLY_BYTES);
    assert_eq!(Reply::decode(&reply).unwrap().check(), Err((1, Status::Lost)));
}

#[test]
fn a_model_is_refused_where_kernels_run() {
    let mut bench = Bench::new();
    let model = bytes(&add());
    let reply = bench.run(|batch| batch.create_module(1, &model));
    assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, Status::Module)));
    let log = bench.log().concat();
    assert!(log.contains("share an NPU with the guest (`device = \"npu:0\"`)"), "{log}");
}

/// Graphs of every kind, each mutated: `PARAVIRT_FRAMES` of them, or a few that an ordinary run has time for.
#[test]
fn mutated_models_do_no_harm() {
    let models: usize = std::env::var("PARAVIRT_FRAMES")
        .map_or_else(|_| crate::sweep::count(20_000), |text| text.parse().unwrap());
    let network = graph(|graph| {
        let x = graph.input("x", Element::F32, &[1, 2, 6, 6])?;
        let w = graph.constant(Tensor::from_f64s(Element::F32, &[3, 2, 3, 3], &[0.5; 54]))?;
        let y = graph.convolution(vm_graph::Convolution::default(), x, w, None)?;
        let y = graph.reshape(y, &[3, 16])?;
        let y = graph.softmax(y, 1)?;
        let [values, places] = graph.top_k(y, 1, 4)?;
        graph.output("values", values)?;
        graph.output("places", places)
    });
    let gathered = graph(|graph| {
        let table = graph.input("table", Element::F16, &[8, 4])?;
        let index = graph.input("index", Element::I32, &[3])?;
        let rows = graph.gather(table, index, 0)?;
        let rows = graph.transpose(rows, &[1, 0])?;
        let rows = graph.cast(rows, Element::F32)?;
        let sums = graph.reduce(vm_graph::Reduction::Sum, rows, &[1])?;
        graph.output("sums", sums)
    });
    let seeds = [bytes(&add()), bytes(&network), bytes(&gathered)];
    let mut rng = crate::sweep::random(13);
    let (mut bench, _) = bench();
    bench.check(|batch| batch.create_buffer(1, 4096), Ok(()));
    let (mut made, mut ran) = (0, 0);
    for number in 0..models {
        let mut code = seeds[number % seeds.len()].clone();
        for _ in 0..rng.next_u32() % 4 {
            let (random, at) = (rng.next_u32(), rng.next_u32() as usize % code.len());
            match random % 4 {
                0 => code[at] = (random >> 8) as u8,
                1 => code[at] ^= 1 << (random >> 8 & 7),
                2 => code.truncate(at.max(1)),
                _ => code.insert(at, (random >> 8) as u8),
            }
        }
        // The arguments of one of them, which the others may be given too.
        let sizes: &[u64] = [&[16, 16, 16, 16][..], &[72, 12, 12], &[32, 3, 4]][rng.next_u32() as usize % 3];
        let views: Vec<_> = sizes.iter().map(|size| Argument::view(1, 0, &[*size]).unwrap()).collect();
        let reply = bench.run(|batch| {
            batch.create_module(1, &code)?;
            batch.launch(1, 0, [1; 3], &views)?;
            batch.fence()
        });
        match Reply::decode(&reply).unwrap().check() {
            Err((0, Status::Module | Status::Quota)) => continue,
            Err((1, Status::Arguments | Status::Range | Status::Device)) => {}
            Ok(()) => ran += 1,
            other => panic!("{other:?}: {:?}", bench.log()),
        }
        made += 1;
        let reply = bench.run(|batch| batch.destroy_module(1));
        assert_eq!(Reply::decode(&reply).unwrap().check(), Ok(()));
    }
    println!("{models} mutated models: {made} were taken, {ran} of them ran");
    assert!(made > models / 8 && ran > models / 64, "the mutations miss what they are for: {made}, {ran}");
    bench.log();
    bench.check(|batch| batch.create_buffer(2, QUOTA - 4096), Ok(()));
}
