//! A worker holds no more host memory for its program than the budget, whatever the program sends, and goes on serving it.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_bridge::calls::{MODES, Mode};
use vm_bridge::orders;
use vm_bridge::ring::Taken;
use vm_bridge::server::{Driver, HostMemory, Lane, Session, serve};
use vm_bridge::wire::{CHUNK, Header, VERSION, WINDOW, control, node, own, put, put_bytes};
use vm_cuda_api::{FUNCTIONS, Kind, Object, number};

/// Keeps the driver's library built.
use vm_cuda_fake as _;

const OK: u32 = 0;
const OUT_OF_MEMORY: u32 = 2;
const NOT_SUPPORTED: u32 = 801;
const MIB: u64 = 1 << 20;
const BUDGET: u64 = 32 * MIB;
/// Bytes of the parameters of the kernel `large`, and graphs of a conditional node.
const LARGE: u64 = 32_000;
const BODIES: u64 = 1000;

static DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| {
    let path: PathBuf =
        std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let driver = Driver::open(&path).expect("the driver");
    assert_eq!(driver.start(), 0);
    Arc::new(driver)
});

/// One program at a time: they have one driver.
static ALONE: Mutex<()> = Mutex::new(());

/// A program with a budget and two threads.
struct Program {
    connection: UnixStream,
    session: Arc<Session>,
    host: HostMemory,
    context: u64,
    lanes: [Lane; 2],
    ticket: u64,
    /// Where the last window was tried.
    mapped: u64,
    _alone: MutexGuard<'static, ()>,
}

impl Program {
    fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let host = HostMemory::new(BUDGET);
        let session = Arc::new(Session::new(DRIVER.clone()).with_host_memory(host.clone()));
        let (connection, far) = UnixStream::pair().expect("a connection");
        let served = session.clone();
        std::thread::spawn(move || serve(&far, &served));
        let lanes = [Lane::new(session.clone()), Lane::new(session.clone())];
        let mut program =
            Self { connection, session, host, context: 0, lanes, ticket: 0, mapped: 0, _alone: alone };
        assert_eq!(program.order([control::HELLO, VERSION.into(), 0, 0], &[]), 0);
        for lane in 0..2 {
            program.context = program.get("cuDevicePrimaryCtxRetain", &[1, 0]);
            assert_eq!(program.call(lane, "cuCtxSetCurrent", &[program.context]).0, OK);
        }
        program
    }

    fn order(&self, words: orders::Order, files: &[std::os::fd::BorrowedFd<'_>]) -> u64 {
        orders::give(&self.connection, words, &[], files).expect("an answer")
    }

    fn send(&mut self, lane: usize, call: u16, asks: bool, payload: &[u8]) -> (Option<u32>, Vec<u64>) {
        let header = Header { len: payload.len() as u32, call, asks, is_bulk: false, ticket: self.ticket };
        self.ticket += 1;
        let mut reply = Vec::new();
        let code = self.lanes[lane].serve(Taken { header, bulk: None }, payload, &mut reply).expect("a call");
        (code, reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect())
    }

    fn call(&mut self, lane: usize, name: &str, words: &[u64]) -> (u32, Vec<u64>) {
        let mut payload = Vec::new();
        words.iter().for_each(|word| put(&mut payload, *word));
        let (code, words) = self.send(lane, number(name).expect(name) as u16, true, &payload);
        (code.expect("an answer"), words)
    }

    /// Makes a call that succeeds, and returns its first word.
    fn get(&mut self, name: &str, words: &[u64]) -> u64 {
        let (code, words) = self.call(0, name, words);
        assert_eq!(code, OK, "{name}");
        words.first().copied().unwrap_or(0)
    }

    /// Sends a part of an image.
    fn image(&mut self, lane: usize, len: usize) -> u32 {
        self.send(lane, own::IMAGE, true, &vec![b'x'; len]).0.expect("an answer")
    }

    /// Returns how often a call succeeds until it is out of memory, and checks that the session goes on.
    fn until_full(&mut self, most: u64, mut call: impl FnMut(&mut Self, u64) -> u32) -> u64 {
        for count in 0..most {
            match call(self, count) {
                OK => {}
                OUT_OF_MEMORY => {
                    assert_eq!(self.call(0, "cuDriverGetVersion", &[1]).0, OK);
                    return count;
                }
                code => panic!("call {count} said {code}"),
            }
        }
        panic!("{most} calls found memory")
    }

    /// Maps windows of 1 MiB until the budget is used up, and returns their number.
    fn windows(&mut self) -> u64 {
        let memory = memfd_create("window", MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&memory, MIB).expect("its length");
        let first = self.mapped;
        let next = |at: &mut u64| {
            *at += MIB;
            self.order([control::WINDOW, WINDOW.start + *at, MIB, 0], &[memory.as_fd()]) == 0
        };
        let mut at = first;
        while next(&mut at) {}
        self.mapped = at;
        (at - first) / MIB - 1
    }

    /// Returns how many MiB of the budget are free.
    fn windows_free(&mut self) -> u64 {
        let count = self.windows();
        assert_eq!(self.order([control::GIVE, 0, MIB, 0], &[]), 0);
        count
    }

    /// Returns the kernel `store` of the fake driver and an empty graph.
    fn kernel_and_graph(&mut self) -> [u64; 2] {
        [self.kernel(b"store\0"), self.get("cuGraphCreate", &[1, 0])]
    }

    /// Returns a kernel of the fake driver.
    fn kernel(&mut self, name: &[u8]) -> u64 {
        assert_eq!(self.send(0, own::IMAGE, true, b"vm-cuda-fake\n\0").0, Some(OK));
        let module = self.call(0, "cuModuleLoadDataEx", &[0, 0, 0]).1[1];
        let mut payload = Vec::new();
        [1, module, name.len() as u64 - 1].iter().for_each(|word| put(&mut payload, *word));
        put_bytes(&mut payload, name);
        let (code, words) = self.send(0, number("cuModuleGetFunction").unwrap() as u16, true, &payload);
        assert_eq!(code, Some(OK));
        words[0]
    }

    /// Returns the parameters of a node of a kind, as small or as large as they may be, and the bytes that a driver needs for them.
    fn parameters(&mut self, graph: u64, kind: u64, large: bool) -> (Vec<u64>, u64) {
        const WRITE_VALUE: u64 = 2;
        const SWITCH: u64 = 2;
        const DESCRIPTIONS: usize = node::DESCRIPTIONS as usize * node::DESCRIPTION / 8;
        let one = 1 | 1 << 32;
        let memory = self.get("cuMemAlloc_v2", &[1, 4096]);
        let mut words = vec![kind];
        let bytes = match (kind, large) {
            (node::KERNEL, _) => {
                let name: &[u8] = if large { b"large\0" } else { b"empty\0" };
                words.extend([self.kernel(name), one, one, one, 0, 0]);
                words.extend(&[7; LARGE as usize / 8][..if large { LARGE as usize / 8 } else { 0 }]);
                if large { LARGE } else { 0 }
            }
            (node::COPY, _) => {
                let mut copy = [0; 25];
                (copy[4], copy[6], copy[15], copy[17]) = (2, memory, 2, memory + 64);
                (copy[9], copy[20]) = (64, 64);
                copy[22..].copy_from_slice(&[64, 1, 1]);
                words.push(0);
                words.extend(copy);
                200
            }
            (node::FILL_KIND, _) => {
                words.extend([memory, 0, 7 | 4 << 32, 16, 1, 0]);
                40
            }
            (node::FUNCTION, _) => {
                words.extend([1, 2]);
                16
            }
            (node::GRAPH, _) => {
                let child = self.get("cuGraphCreate", &[1, 0]);
                let bytes = self.add(child, node::KERNEL, large).1;
                words.push(child);
                bytes
            }
            (node::WAIT | node::RECORD, _) => {
                words.push(self.get("cuEventCreate", &[1, 0]));
                8
            }
            (node::ALLOCATE, _) => {
                // Pinned memory of device 0.
                words.extend([1, 1, 0, 0, node::DESCRIPTIONS]);
                words.extend([0; DESCRIPTIONS]);
                words.push(4096);
                8 * (node::ALLOCATION + DESCRIPTIONS) as u64
            }
            (node::VALUES, _) => {
                let count = if large { node::OPERATIONS } else { 1 };
                words.extend([0, count, 0]);
                (0..count).for_each(|_| words.extend([WRITE_VALUE, memory, 5, 0, 0, 0]));
                8 * node::OPERATION as u64 * count
            }
            (node::CONDITIONAL, _) => {
                let handle = self.get("cuGraphConditionalHandleCreate", &[1, graph, 0, 0, 0]);
                words.extend([handle, SWITCH | BODIES << 32, 0]);
                BODIES * 1024
            }
            _ => 0,
        };
        (words, bytes)
    }

    /// Adds a node, and returns it with the bytes of its parameters.
    fn add(&mut self, graph: u64, kind: u64, large: bool) -> (u64, u64) {
        let (mut words, bytes) = self.parameters(graph, kind, large);
        words.extend([1, graph, 0, 0, 0]);
        (self.get("cuGraphAddNode", &words), bytes)
    }

    /// Makes a call whose parameters are these objects, after the parameters of a node, and returns its result and the bytes that it was charged.
    fn charged(&mut self, name: &str, parameters: &[u64], objects: &[(Object, u64)]) -> (u32, u64) {
        let mut words = parameters.to_vec();
        let mut left = objects.to_vec();
        for (at, parameter) in FUNCTIONS[number(name).expect(name)].parameters.iter().enumerate() {
            words.push(match parameter.kind {
                Kind::Handle(object) => match left.iter().position(|(of, _)| *of == object) {
                    Some(at) => left.remove(at).1,
                    None => 0,
                },
                Kind::Pointer { .. } if at == 0 => 1,
                _ => 0,
            });
        }
        let before = self.host.left();
        let (code, _) = self.call(0, name, &words);
        (code, before.saturating_sub(self.host.left()))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.session.end();
        if !std::thread::panicking() {
            assert_eq!(self.call(0, "cuDevicePrimaryCtxReset_v2", &[0]).0, OK);
        }
    }
}

#[test]
fn parts_of_images_without_end_are_refused() {
    let mut program = Program::new();
    let count = program.until_full(1000, |program, _| program.image(0, CHUNK));
    assert!((BUDGET / MIB - 2..=BUDGET / MIB).contains(&count), "{count}");
    // The parts were dropped. Threads share the budget.
    assert_eq!(program.image(0, CHUNK), OK);
    let more = program.until_full(1000, |program, _| program.image(1, CHUNK));
    assert!((count - 2..count).contains(&more), "{count}, then {more}");
    // Other calls dropped the parts again. Windows and lanes count in the same budget.
    assert!((count - 2..=count).contains(&program.windows()));
    let (_ours, theirs) = UnixStream::pair().expect("a lane");
    assert_eq!(program.order([control::LANE, 0, 0, 0], &[theirs.as_fd()]), OUT_OF_MEMORY.into());
}

#[test]
fn a_module_has_its_image_as_long_as_it_is_there() {
    let mut program = Program::new();
    let mut text = b"vm-cuda-fake\n".to_vec();
    text.resize(10 * CHUNK, b' ');
    text.push(0);
    let load = |program: &mut Program| {
        for part in text.chunks(CHUNK) {
            program.send(0, own::IMAGE, false, part);
        }
        let (code, words) = program.call(0, "cuModuleLoadDataEx", &[0, 0, 0]);
        if code == OK { (words[0] as u32, words[1]) } else { (code, 0) }
    };
    let modules = [load(&mut program), load(&mut program), load(&mut program)];
    assert_eq!(modules.map(|(code, _)| code), [OK; 3]);
    assert_eq!(load(&mut program).0, OUT_OF_MEMORY);
    assert_eq!(program.call(0, "cuModuleUnload", &[modules[1].1]).0, OK);
    assert_eq!(load(&mut program).0, OK);
    assert_eq!(load(&mut program).0, OUT_OF_MEMORY);
}

#[test]
fn handles_and_addresses_without_end_are_refused() {
    let mut program = Program::new();
    let mut first = 0;
    let events = program.until_full(BUDGET, |program, count| {
        let (code, words) = program.call(0, "cuEventCreate", &[1, 0]);
        if count == 0 {
            first = words[0];
        }
        code
    });
    assert!(events > 1000, "{events}");
    // Destroying one makes room for another.
    assert_eq!(program.call(0, "cuEventDestroy_v2", &[first]).0, OK);
    assert_eq!(program.call(0, "cuEventCreate", &[1, 0]).0, OK);
    assert_eq!(program.call(0, "cuEventCreate", &[1, 0]).0, OUT_OF_MEMORY);
    for (name, words) in
        [("cuMemAddressReserve", &[1, 2 * MIB, 0, 0, 0][..]), ("cuMemMap", &[0, 2 * MIB, 0, 0, 0])]
    {
        assert_eq!(program.call(0, name, words).0, OUT_OF_MEMORY, "{name}");
    }
    assert_eq!(program.call(0, "cuMemAlloc_v2", &[1, 16]).0, OUT_OF_MEMORY);
}

#[test]
fn copies_of_graphs_are_counted_with_all_that_is_in_them() {
    let mut program = Program::new();
    let [_, graph] = program.kernel_and_graph();
    assert_eq!(program.call(0, "cuGraphAddEmptyNode", &[1, graph, 0, 0]).0, OK);
    // Each graph contains the previous one twice: the last would have 2^60 nodes.
    let mut inner = graph;
    let depth = program.until_full(60, |program, _| {
        let (code, words) = program.call(0, "cuGraphCreate", &[1, 0]);
        if code != OK {
            return code;
        }
        let outer = words[0];
        for _ in 0..2 {
            let (code, _) = program.call(0, "cuGraphAddChildGraphNode", &[1, outer, 0, 0, inner]);
            if code != OK {
                return code;
            }
        }
        inner = outer;
        OK
    });
    assert!((5..20).contains(&depth), "{depth}");
    for (name, words) in [("cuGraphClone", &[1, inner][..]), ("cuGraphInstantiateWithFlags", &[1, inner, 0])]
    {
        let count = program.until_full(10_000, |program, _| program.call(0, name, words).0);
        assert!(count < 10_000, "{name} {count}");
    }
}

#[test]
fn copies_of_graphs_are_counted_with_their_references_to_user_objects() {
    const OBJECTS: u64 = 1000;
    /// No reference takes less.
    const BYTES: u64 = 64;
    let mut program = Program::new();
    let graph = program.get("cuGraphCreate", &[1, 0]);
    let before = program.host.left();
    let objects: Vec<_> =
        (1..=OBJECTS).map(|at| program.get("cuUserObjectCreate", &[at, at, 1, 1])).collect();
    let made = program.host.left();
    for object in &objects {
        assert_eq!(program.call(0, "cuGraphRetainUserObject", &[graph, *object, 1, 0]).0, OK);
        assert_eq!(program.call(0, "cuGraphRetainUserObject", &[graph, *object, 2, 0]).0, OK);
    }
    assert!(made - program.host.left() >= OBJECTS * BYTES && before > made);
    let copy = program.get("cuGraphClone", &[1, graph]);
    let outer = program.get("cuGraphCreate", &[1, 0]);
    assert_eq!(program.call(0, "cuGraphAddChildGraphNode", &[1, outer, 0, 0, copy]).0, OK);
    for of in [graph, copy, outer] {
        for (name, words) in [("cuGraphClone", &[1, of][..]), ("cuGraphInstantiateWithFlags", &[1, of, 0])] {
            let before = program.host.left();
            let made = program.get(name, words);
            let taken = before - program.host.left();
            assert!(taken >= OBJECTS * BYTES, "{name} {taken}");
            let end = if name == "cuGraphClone" { "cuGraphDestroy" } else { "cuGraphExecDestroy" };
            assert_eq!(program.call(0, end, &[made]).0, OK);
            assert_eq!(program.host.left(), before, "{end}");
        }
    }
    for object in &objects {
        assert_eq!(program.call(0, "cuGraphReleaseUserObject", &[graph, *object, 1]).0, OK);
        assert_eq!(program.call(0, "cuGraphReleaseUserObject", &[graph, *object, 2]).0, OK);
    }
    let before = program.host.left();
    program.get("cuGraphClone", &[1, graph]);
    assert!(before - program.host.left() < OBJECTS * BYTES);
    // The graph in a node of one that runs is replaced by one with references.
    let child = program.get("cuGraphAddChildGraphNode", &[1, outer, 0, 0, copy]);
    let exec = program.get("cuGraphInstantiateWithFlags", &[1, outer, 0]);
    assert_eq!(program.call(0, "cuGraphExecNodeSetParams", &[node::GRAPH, copy, exec, child, 0]).0, OK);
}

#[test]
fn a_graph_that_a_node_owns_is_charged_until_its_owner_ends() {
    let mut program = Program::new();
    let mut left = Vec::new();
    for _ in 0..3 {
        let [owner, child] = [0; 2].map(|_| program.get("cuGraphCreate", &[1, 0]));
        assert_eq!(program.call(0, "cuGraphAddEmptyNode", &[1, child, 0, 0]).0, OK);
        let (code, _) = program.call(0, "cuGraphAddNode", &[node::MOVED, child, 1, owner, 0, 0, 0]);
        assert_eq!(code, OK);
        left.push(program.host.left());
        assert_eq!(program.call(0, "cuGraphDestroy", &[owner]).0, OK);
        left.push(program.host.left());
    }
    assert_eq!(left[..2], left[4..], "{left:?}");
    assert!(left[0] < left[1], "{left:?}");
}

#[test]
fn edges_are_counted_where_they_are_added_and_in_copies() {
    let mut program = Program::new();
    let call = |program: &mut Program, name: &str, words: &[u64]| program.call(0, name, words);
    let graph = call(&mut program, "cuGraphCreate", &[1, 0]).1[0];
    let add = |program: &mut Program, graph: u64, nodes: &[u64]| {
        let mut words = vec![1, graph, 1, nodes.len() as u64];
        words.extend(nodes);
        program.call(0, "cuGraphAddEmptyNode", &words)
    };
    // 500 nodes take half a MiB. Their edges take 7.6 MiB.
    let mut nodes = Vec::new();
    let before = program.windows_free();
    for _ in 0..500 {
        let (code, words) = add(&mut program, graph, &nodes);
        assert_eq!(code, OK);
        nodes.push(words[0]);
    }
    let with_edges = program.windows_free();
    assert!((8..=10).contains(&(before - with_edges)), "{before}, then {with_edges}");
    let clones = program.until_full(100, |program, _| program.call(0, "cuGraphClone", &[1, graph]).0);
    assert!((1..=3).contains(&clones), "{clones}");
    drop(program);

    // Edges that are added and removed between existing nodes.
    let mut program = Program::new();
    let graph = program.call(0, "cuGraphCreate", &[1, 0]).1[0];
    let nodes: Vec<u64> = (0..700).map(|_| add(&mut program, graph, &[]).1[0]).collect();
    let (sources, sinks) = nodes.split_at(350);
    let before = program.windows_free();
    let change = |program: &mut Program, name: &str| {
        for to in sinks {
            let mut words = vec![graph, 1, 1, 350];
            words.extend(sources);
            words.extend([*to; 350]);
            assert_eq!(program.call(0, name, &words).0, OK);
        }
    };
    for _ in 0..2 {
        change(&mut program, "cuGraphAddDependencies");
        let with_edges = program.windows_free();
        assert!((7..=9).contains(&(before - with_edges)), "{before}, then {with_edges}");
        change(&mut program, "cuGraphRemoveDependencies");
        assert_eq!(program.windows_free(), before);
    }
    // The edges of a node end with it, at both ends.
    change(&mut program, "cuGraphAddDependencies");
    for node in sources {
        assert_eq!(program.call(0, "cuGraphDestroyNode", &[*node]).0, OK);
    }
    assert!(program.windows_free() >= before);
    assert_eq!(program.call(0, "cuGraphDestroy", &[graph]).0, OK);
}

#[test]
fn edges_of_captures_are_counted() {
    let mut program = Program::new();
    let [kernel, _] = program.kernel_and_graph();
    let stream = program.call(0, "cuStreamCreate", &[1, 1]).1[0];
    assert_eq!(program.call(0, "cuStreamBeginCapture_v2", &[stream, 2]).0, OK);
    let launch = [kernel, 1, 1, 1, 1, 1, 1, 0, stream, 64, 1 | 1 << 32];
    // Stream, nodes, their number, and CU_STREAM_SET_CAPTURE_DEPENDENCIES.
    let mut update = vec![stream, 1, 500, 1];
    for _ in 0..500 {
        assert_eq!(program.call(0, "cuLaunchKernel", &launch).0, OK);
        let (code, words) = program.call(0, "cuStreamGetCaptureInfo_v2", &[stream, 1, 1, 1, 1, 1]);
        assert_eq!((code, words[3]), (OK, 1));
        update.push(words[4]);
    }
    // Each further launch has 500 edges.
    let launches = program.until_full(100_000, |program, _| {
        match program.call(0, "cuStreamUpdateCaptureDependencies", &update).0 {
            OK => program.call(0, "cuLaunchKernel", &launch).0,
            code => code,
        }
    });
    assert!((100..700).contains(&launches), "{launches}");
}

#[test]
fn a_capture_without_end_is_refused() {
    let mut program = Program::new();
    let [kernel, _] = program.kernel_and_graph();
    let stream = program.call(0, "cuStreamCreate", &[1, 1]).1[0];
    assert_eq!(program.call(0, "cuStreamBeginCapture_v2", &[stream, 2]).0, OK);
    let memory = 64;
    let one = 1 | 1 << 32;
    let launch = [kernel, 1, 1, 1, 1, 1, 1, 0, stream, memory, one];
    let launches = program.until_full(100_000, |program, _| program.call(0, "cuLaunchKernel", &launch).0);
    assert!(launches > 1000, "{launches}");
    let (code, words) = program.call(0, "cuStreamEndCapture", &[stream, 1]);
    assert_eq!(code, OK);
    // The graph is charged for the nodes until it is destroyed.
    assert!(program.windows() < BUDGET / MIB / 4);
    assert_eq!(program.call(0, "cuGraphDestroy", &[words[0]]).0, OK);
    assert!(program.windows() > BUDGET / MIB / 2);
}

/// Returns whether a function makes or grows graph nodes: in a graph, in a copy of a graph, or by a capture.
fn changes_nodes(name: &str) -> bool {
    let is_of_graph = name.starts_with("cuGraphAdd") && name.contains("Node")
        || name.contains("NodeSetParams")
        || ["cuGraphClone", "cuGraphInstantiate", "cuGraphExecUpdate"]
            .iter()
            .any(|begin| name.starts_with(begin));
    let is_captured =
        ["cuLaunch", "cuStreamBatchMemOp", "cuGraphLaunch"].iter().any(|begin| name.starts_with(begin));
    (is_of_graph || is_captured) && !name.ends_with("_ptsz") && !name.ends_with("_ptds")
}

#[test]
fn every_function_that_makes_or_grows_a_node_charges_its_parameters() {
    const ALL: [u64; 11] = [
        node::KERNEL,
        node::COPY,
        node::FILL_KIND,
        node::FUNCTION,
        node::GRAPH,
        node::EMPTY,
        node::WAIT,
        node::RECORD,
        node::ALLOCATE,
        node::VALUES,
        node::CONDITIONAL,
    ];
    let (mut checked, mut short) = (0, Vec::new());
    for (at, function) in FUNCTIONS.iter().enumerate() {
        let name = function.name.as_str();
        if MODES[at] == Mode::Unsupported || !changes_nodes(name) {
            continue;
        }
        let is_setter = name.contains("NodeSetParams");
        let kinds = match (node::kind(name), name) {
            (Some(kind), _) => vec![kind],
            (None, "cuGraphAddNode" | "cuGraphAddNode_v2") => ALL.to_vec(),
            // The driver rejects the other kinds.
            (None, "cuGraphNodeSetParams") => vec![node::KERNEL, node::VALUES],
            (None, "cuGraphExecNodeSetParams") => vec![node::KERNEL, node::VALUES, node::GRAPH],
            (None, _) => vec![node::GRAPH],
        };
        for kind in kinds {
            let (charged, bytes) = charge(&mut Program::new(), name, kind, is_setter);
            checked += 1;
            if charged < bytes {
                short.push(format!("{name} of kind {kind}: {charged} for {bytes}"));
            }
        }
    }
    assert!(checked > 50 && short.is_empty(), "{checked} checked, charged too little: {short:#?}");
}

/// Calls a function that makes or grows a node of a kind. Returns the bytes charged and the bytes of the node's parameters.
fn charge(program: &mut Program, name: &str, kind: u64, is_setter: bool) -> (u64, u64) {
    let graph = program.get("cuGraphCreate", &[1, 0]);
    let of = (Object::Graph, graph);
    let (code, charged, bytes) = match name {
        _ if is_setter => {
            let (node, small) = program.add(graph, kind, false);
            let exec = program.get("cuGraphInstantiateWithFlags", &[1, graph, 0]);
            let (mut parameters, large) = program.parameters(graph, kind, true);
            let mut objects =
                vec![(Object::Exec, exec), (Object::Node, node), (Object::Context, program.context)];
            if name == "cuGraphExecChildGraphNodeSetParams" {
                objects.push((Object::Graph, parameters[1]));
                parameters.clear();
            }
            let (code, charged) = program.charged(name, &parameters, &objects);
            // The same parameters again replace the ones that are charged.
            assert_eq!(program.charged(name, &parameters, &objects), (OK, 0), "{name} of kind {kind}");
            (code, charged, large - small)
        }
        "cuGraphAddEmptyNode" => {
            let (code, charged) = program.charged(name, &[], &[of]);
            (code, charged, 8)
        }
        "cuGraphAddEventRecordNode" | "cuGraphAddEventWaitNode" => {
            let event = program.get("cuEventCreate", &[1, 0]);
            let (code, charged) = program.charged(name, &[], &[of, (Object::Event, event)]);
            (code, charged, 8)
        }
        "cuGraphAddMemFreeNode" => {
            let (mut words, _) = program.parameters(graph, node::ALLOCATE, true);
            words.extend([1, graph, 0, 0, 0]);
            let (code, words) = program.call(0, "cuGraphAddMemAllocNode", &words);
            assert_eq!(code, OK);
            let before = program.host.left();
            let (code, _) = program.call(0, name, &[1, graph, 0, 0, words[1]]);
            (code, before - program.host.left(), 8)
        }
        "cuGraphAddChildGraphNode" => {
            let (words, bytes) = program.parameters(graph, kind, true);
            let (code, charged) = program.charged(name, &[], &[of, (Object::Graph, words[1])]);
            (code, charged, bytes)
        }
        _ if name.starts_with("cuGraphAdd") => {
            let (parameters, bytes) = program.parameters(graph, kind, true);
            let (code, charged) =
                program.charged(name, &parameters, &[of, (Object::Context, program.context)]);
            (code, charged, bytes)
        }
        "cuGraphExecUpdate" | "cuGraphExecUpdate_v2" => {
            let (_, small) = program.add(graph, kind, false);
            let exec = program.get("cuGraphInstantiateWithFlags", &[1, graph, 0]);
            let larger = program.get("cuGraphCreate", &[1, 0]);
            let (_, large) = program.add(larger, kind, true);
            let before = program.host.left();
            let (code, words) = program.call(0, name, &[exec, larger]);
            assert_eq!(words[0], u64::from(OK));
            (code, before - program.host.left(), large - small)
        }
        _ if name.starts_with("cuGraphClone") || name.starts_with("cuGraphInstantiate") => {
            let kinds = [node::KERNEL, node::VALUES, node::GRAPH];
            let bytes = kinds.into_iter().map(|kind| program.add(graph, kind, true).1).sum();
            let before = program.host.left();
            let words: &[u64] =
                if name.contains("WithParams") { &[graph, 0, 0] } else { &[1, graph, 0, 0, 0] };
            let (code, _) = program.call(0, name, words);
            (code, before - program.host.left(), bytes)
        }
        _ => return charge_of_capture(program, name, graph),
    };
    assert_eq!(code, OK, "{name} of kind {kind}");
    (charged, bytes)
}

/// The same for a function that is captured. Returns the smaller charge of those during and after the capture.
fn charge_of_capture(program: &mut Program, name: &str, graph: u64) -> (u64, u64) {
    let one = 1 | 1 << 32;
    let stream = program.get("cuStreamCreate", &[1, 1]);
    let mut words = match name {
        "cuLaunchKernel" | "cuLaunchCooperativeKernel" => {
            vec![program.kernel(b"large\0"), 1, 1, 1, 1, 1, 1, 0, stream]
        }
        "cuLaunchKernelEx" => vec![program.kernel(b"large\0"), one, one, one, 0, stream, 0],
        "cuLaunchHostFunc" => vec![stream, 1, 2, 0],
        "cuStreamBatchMemOp" | "cuStreamBatchMemOp_v2" => vec![stream, node::OPERATIONS, 1, 0],
        "cuGraphLaunch" => {
            program.add(graph, node::KERNEL, true);
            vec![program.get("cuGraphInstantiateWithFlags", &[1, graph, 0]), stream]
        }
        _ => panic!("add a case for {name}"),
    };
    let bytes = match name {
        "cuLaunchHostFunc" => 16,
        "cuGraphLaunch" => LARGE,
        _ if name.starts_with("cuStreamBatchMemOp") => {
            let (values, bytes) = program.parameters(graph, node::VALUES, true);
            words.extend(&values[4..]);
            bytes
        }
        _ => {
            words.extend([7; LARGE as usize / 8]);
            LARGE
        }
    };
    assert_eq!(program.call(0, "cuStreamBeginCapture_v2", &[stream, 2]).0, OK);
    let before = program.host.left();
    // The fake driver has no batches of a stream. They are charged before the driver is called.
    let is_batch = name.starts_with("cuStreamBatchMemOp");
    let expected = if is_batch { NOT_SUPPORTED } else { OK };
    assert_eq!(program.call(0, name, &words).0, expected, "{name}");
    let during = before - program.host.left();
    program.get("cuStreamEndCapture", &[stream, 1]);
    let after = before.saturating_sub(program.host.left());
    (if is_batch { during } else { during.min(after) }, bytes)
}

#[test]
fn a_node_that_does_not_fit_is_refused_before_the_driver_makes_it() {
    let mut program = Program::new();
    let graph = program.get("cuGraphCreate", &[1, 0]);
    let (mut words, bytes) = program.parameters(graph, node::CONDITIONAL, true);
    // Less than the graphs of the node need, and more than any call needs.
    while program.host.left() > bytes + MIB / 2 {
        assert_eq!(program.image(0, (program.host.left() - bytes - MIB / 2).min(CHUNK as u64) as usize), OK);
    }
    words.extend([1, graph, 0, 0, 0]);
    assert_eq!(program.call(0, "cuGraphAddNode", &words).0, OUT_OF_MEMORY);
    assert_eq!(program.call(0, "cuGraphGetNodes", &[graph, 0, 1, 0]), (OK, vec![0]));
}
