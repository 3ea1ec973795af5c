//! Nodes of graphs that no program makes: what is in them is refused before the driver sees it. The fake driver would take it.

use std::path::PathBuf;
use std::sync::Arc;

use vm_bridge::ring::Taken;
use vm_bridge::server::{Driver, Lane, Session};
use vm_bridge::wire::{Header, LOG, Malformed, code, node, own, put, put_bytes};
use vm_cuda_api::number;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

/// A session with a lane, and what the tests need of the driver.
struct Place {
    session: Arc<Session>,
    lane: Lane,
    ticket: u64,
    context: u64,
    graph: u64,
    store: u64,
    memory: u64,
}

/// What a call returned: the driver's result and words.
type Answer = Result<(u32, Vec<u64>), Malformed>;

impl Place {
    fn new() -> Self {
        let path: PathBuf =
            std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
        let driver = Driver::open(&path).expect("the driver");
        assert_eq!(driver.start(), 0);
        let session = Arc::new(Session::new(Arc::new(driver)));
        let lane = Lane::new(session.clone());
        let mut place = Self { session, lane, ticket: 0, context: 0, graph: 0, store: 0, memory: 0 };
        place.context = place.get("cuDevicePrimaryCtxRetain", &[1, 0]);
        assert_eq!(place.call("cuCtxSetCurrent", &[place.context]), Ok((0, vec![])));
        place.graph = place.get("cuGraphCreate", &[1, 0]);
        place.memory = place.get("cuMemAlloc_v2", &[1, 4096]);
        assert_eq!(place.send(own::IMAGE.into(), b"vm-cuda-fake\n\0"), Ok((0, vec![])));
        let (code, loaded) = place.call("cuModuleLoadDataEx", &[0, 0, 0]).expect("a call");
        assert_eq!((code, loaded[0]), (0, 0));
        let mut payload = words(&[1, loaded[1], 5]);
        put_bytes(&mut payload, b"store\0");
        place.store = place.send(the("cuModuleGetFunction"), &payload).expect("a call").1[0];
        place
    }

    fn send(&mut self, call: usize, payload: &[u8]) -> Answer {
        let header = Header {
            len: payload.len() as u32,
            call: call as u16,
            asks: true,
            is_bulk: false,
            ticket: self.ticket,
        };
        self.ticket += 1;
        let mut reply = Vec::new();
        let code = match self.lane.serve(Taken { header, bulk: None }, payload, &mut reply) {
            Ok(code) => code.expect("an answer"),
            Err(malformed) => {
                // The session would end; this one goes on with the next lane.
                self.lane = Lane::new(self.session.clone());
                assert_eq!(self.call("cuCtxSetCurrent", &[self.context]), Ok((0, vec![])));
                return Err(malformed);
            }
        };
        Ok((code, reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()))
    }

    fn call(&mut self, name: &str, payload: &[u64]) -> Answer {
        self.send(the(name), &words(payload))
    }

    /// The first word that a call returns.
    fn get(&mut self, name: &str, payload: &[u64]) -> u64 {
        let (code, words) = self.call(name, payload).expect(name);
        assert_eq!(code, 0, "{name}");
        words[0]
    }

    /// A kernel's parameters, as they are put into a node.
    fn kernel(&self, function: u64) -> Vec<u64> {
        let one = 1 | 1 << 32;
        vec![node::KERNEL, function, one, one, one, 0, 0, self.memory, 77]
    }

    /// What adds a node to the graph: no dependencies, and a context where the function has one.
    fn add(&self, of: &[u64], has_context: bool) -> Vec<u64> {
        let head = [1, self.graph, 0, 0, 0, self.context];
        [of, &head[..if has_context { 6 } else { 5 }]].concat()
    }
}

fn the(name: &str) -> usize {
    number(name).expect(name)
}

fn words(all: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    all.iter().for_each(|word| put(&mut bytes, *word));
    bytes
}

/// A copy of 64 bytes, of which each end is a kind (1 host, 2 device, 3 array) and an address.
fn copy(from: (u64, u64), to: (u64, u64)) -> Vec<u64> {
    let mut words = [0; 25];
    for (at, (kind, address)) in [(0, from), (11, to)] {
        words[at + 4] = kind;
        words[at + 4 + kind as usize] = address;
        words[at + 9] = 64;
    }
    words[22..].copy_from_slice(&[64, 1, 1]);
    [&[node::COPY, 0], &words[..]].concat()
}

fn fill(at: u64, pitch: u64, unit: u64, width: u64, height: u64) -> Vec<u64> {
    vec![node::FILL_KIND, at, pitch, 7 | unit << 32, width, height, 0]
}

#[test]
fn memory_that_the_program_has_not_is_in_no_node() {
    let mut place = Place::new();
    // Memory of this process, as it would be the worker's own.
    let secret = [77u64; 64];
    let (own, memory) = (secret.as_ptr() as u64, place.memory);
    assert_eq!(place.call("cuMemsetD32_v2", &[memory, 5, 1024]), Ok((0, vec![])));
    let mut check = |name: &str, of: Vec<u64>, expect: u32| {
        let payload = place.add(&of, name != "cuGraphAddNode");
        let (code, _) = place.call(name, &payload).expect(name);
        assert_eq!(code, expect, "{name} {of:?}");
    };
    const BAD: u32 = code::INVALID_VALUE;
    check("cuGraphAddMemcpyNode", copy((2, memory), (2, memory + 64)), 0);
    // The program is asked for it: it may have memory at the same address.
    check("cuGraphAddMemcpyNode", copy((1, own), (2, memory)), 0);
    check("cuGraphAddMemcpyNode", copy((2, memory), (1, own)), 0);
    check("cuGraphAddNode", copy((1, own), (1, own)), 0);
    check("cuGraphAddMemcpyNode", copy((2, own), (2, memory)), BAD);
    check("cuGraphAddMemcpyNode", copy((2, memory), (2, own)), BAD);
    check("cuGraphAddMemcpyNode", copy((1, 0), (2, memory)), BAD);
    check("cuGraphAddMemcpyNode", copy((3, memory), (2, memory)), code::INVALID_HANDLE);
    check("cuGraphAddMemcpyNode", copy((4, memory), (2, memory)), code::NOT_SUPPORTED);
    let mut endless = copy((2, memory), (2, memory));
    (endless[2 + 1], endless[2 + 9]) = (u64::MAX, u64::MAX);
    check("cuGraphAddMemcpyNode", endless, BAD);
    check("cuGraphAddMemsetNode", fill(memory, 0, 4, 16, 1), 0);
    check("cuGraphAddMemsetNode", fill(own, 0, 4, 16, 1), BAD);
    check("cuGraphAddMemsetNode", fill(memory, u64::MAX, 4, 16, 3), BAD);
    check("cuGraphAddMemsetNode", fill(memory, 0, 4, u64::MAX, 1), BAD);
    // Nor does the driver read or write it there.
    let exec = place.get("cuGraphInstantiateWithFlags", &[1, place.graph, 0]);
    assert_eq!(place.call("cuGraphLaunch", &[exec, 0]), Ok((0, vec![])));
    assert_eq!(place.call("cuCtxSynchronize", &[]), Ok((0, vec![])));
    let (code, found) = place.call("cuMemcpyDtoH_v2", &[memory, 128, 0, 0]).expect("a copy");
    assert_eq!((code, &secret), (0, &[77; 64]));
    assert!(!found.contains(&77), "{found:?}");
    // As it is put into a node that is there, and into what runs: one of another kind to the driver.
    const OTHER: u32 = code::NOT_SUPPORTED;
    let payload = place.add(&copy((2, memory), (2, memory + 64)), true);
    let node = place.get("cuGraphAddMemcpyNode", &payload);
    let exec = place.get("cuGraphInstantiateWithFlags", &[1, place.graph, 0]);
    let set = |tail: &[u64]| [&copy((1, own), (2, memory))[..], tail].concat();
    assert_eq!(place.call("cuGraphMemcpyNodeSetParams", &set(&[node, 0])), Ok((OTHER, vec![])));
    let tail = [exec, node, 0, place.context];
    assert_eq!(place.call("cuGraphExecMemcpyNodeSetParams", &set(&tail)), Ok((OTHER, vec![])));
    assert_eq!(place.call("cuGraphNodeSetParams", &set(&[node, 0])), Ok((OTHER, vec![])));
    // Longer than any memory, and than what an address reaches.
    for (width, pitch, rows, expect) in
        [(1 << 50, 0, 1, code::OUT_OF_MEMORY), (64, u64::MAX, 3, BAD), (0, 0, 1, BAD)]
    {
        let mut of = copy((1, own), (1, own));
        (of[2 + 22], of[2 + 9], of[2 + 23]) = (width, pitch, rows);
        let payload = place.add(&of, true);
        assert_eq!(
            place.call("cuGraphAddMemcpyNode", &payload),
            Ok((expect, vec![])),
            "{width} {pitch} {rows}"
        );
    }
}

#[test]
fn handles_are_of_their_kind() {
    let mut place = Place::new();
    let event = place.get("cuEventCreate", &[1, 0]);
    let (graph, store) = (place.graph, place.store);
    let payload = place.add(&place.kernel(store), false);
    let node = place.get("cuGraphAddKernelNode_v2", &payload);
    let mut check = |name: &str, payload: &[u64], expect: u32| {
        let (code, _) = place.call(name, payload).expect(name);
        assert_eq!(code, expect, "{name} {payload:?}");
    };
    const NONE: u32 = code::INVALID_HANDLE;
    for function in [event, graph, 0, 0x77] {
        let of = [node::KERNEL, function, 0, 0, 0, 0, 0, 0, 0];
        check("cuGraphAddKernelNode_v2", &[&of[..], &[1, graph, 0, 0, 0]].concat(), NONE);
    }
    check("cuGraphKernelNodeGetParams_v2", &[graph], NONE);
    check("cuGraphHostNodeGetParams", &[event], NONE);
    check("cuGraphExecUpdate_v2", &[graph, graph], NONE);
    check("cuGraphExecUpdate", &[node, graph], NONE);
    check("cuGraphInstantiateWithParams", &[node, 0, 0], NONE);
    check("cuGraphDebugDotPrint", &[node, 0], NONE);
    check("cuGraphNodeGetType", &[event, 1], NONE);
    check("cuGraphAddChildGraphNode", &[1, graph, 0, 0, node], NONE);
    check("cuGraphAddNode", &[node::GRAPH, event, 1, graph, 0, 0, 0], NONE);
    check("cuGraphAddNode", &[node::GRAPH, 0, 1, graph, 0, 0, 0], code::INVALID_VALUE);
    check("cuGraphAddNode", &[node::RECORD, node, 1, graph, 0, 0, 0], NONE);
    check("cuGraphAddNode", &[node::FUNCTION, 0, 1, 1, graph, 0, 0, 0], code::INVALID_VALUE);
    check("cuGraphAddEmptyNode", &[1, graph, 1, 1, event], NONE);
    check("cuGraphAddDependencies", &[graph, 1, 1, 1, node, event], NONE);
    // Kinds that do not cross, and those that there are not.
    for kind in [8, 9, 14, 99, u64::MAX] {
        check("cuGraphAddNode", &[kind, 0, 0, 0, 1, graph, 0, 0, 0], code::NOT_SUPPORTED);
    }
    // Nodes are gone with their graph, and the graph that is in one with it.
    let inner = place.get("cuGraphCreate", &[1, 0]);
    let outer = place.get("cuGraphAddChildGraphNode", &[1, graph, 0, 0, inner]);
    let copied = place.get("cuGraphChildGraphNodeGetGraph", &[outer, 1]);
    assert_eq!(place.call("cuGraphDestroy", &[graph]), Ok((0, vec![])));
    for (name, payload) in [
        ("cuGraphNodeGetType", &[node, 1][..]),
        ("cuGraphNodeGetType", &[outer, 1]),
        ("cuGraphGetNodes", &[copied, 0, 1, 0]),
        ("cuGraphDestroy", &[graph]),
    ] {
        assert_eq!(place.call(name, payload), Ok((NONE, vec![])), "{name} {payload:?}");
    }
}

#[test]
fn what_is_no_node_ends_the_session() {
    let mut place = Place::new();
    let (graph, store) = (place.graph, place.store);
    let kernel = place.kernel(store);
    let mut check = |name: &str, payload: &[u64]| {
        assert_eq!(place.call(name, payload), Err(Malformed), "{name} {payload:?}");
    };
    // Another kind than the function's, parameters that are not all there, and more dependencies than there are.
    check("cuGraphAddKernelNode_v2", &[node::EMPTY, 1, graph, 0, 0, 0]);
    check("cuGraphAddHostNode", &[node::RECORD, 1, graph, 0, 0, 0]);
    check("cuGraphAddKernelNode_v2", &kernel[..8]);
    check("cuGraphAddKernelNode_v2", &[&kernel[..], &[1, graph, 1, 9, 0]].concat());
    check("cuGraphAddMemcpyNode", &copy((2, 0), (2, 0))[..20]);
    check("cuGraphAddDependencies", &[graph, 1, 1, 1 << 14]);
    check("cuGraphExecUpdate_v2", &[]);
    check("cuLinkCreate_v2", &[0, LOG as u64 + 1, 0]);
    check("cuLinkCreate_v2", &[65, 0, 0]);
    // As many as nobody sends are refused without a look.
    for count in [u64::MAX, 1 << 40, (1 << 14) + 1] {
        let payload = [&place.kernel(store)[..], &[1, graph, 1, count, 0]].concat();
        assert_eq!(
            place.call("cuGraphAddKernelNode_v2", &payload),
            Ok((code::INVALID_VALUE, vec![])),
            "{count}"
        );
        let edges = [graph, 1, 1, 1, count];
        assert_eq!(place.call("cuGraphGetEdges", &edges), Ok((code::INVALID_VALUE, vec![])), "{count}");
    }
}

#[test]
fn who_has_no_server_shares_nothing() {
    let mut place = Place::new();
    let refused = Ok((code::NOT_SUPPORTED, vec![]));
    let event = place.get("cuEventCreate", &[1, 6]);
    assert_eq!(place.call("cuIpcGetMemHandle", &[place.memory]), refused);
    assert_eq!(place.call("cuIpcGetEventHandle", &[event]), refused);
    assert_eq!(place.call("cuIpcOpenMemHandle_v2", &[0, 0, 0, 0, 0, 0, 0, 0, 1]), refused);
    assert_eq!(place.call("cuIpcOpenEventHandle", &[0; 8]), refused);
    assert_eq!(place.call("cuIpcOpenEventHandle", &[0; 7]), Err(Malformed));
    let none = Ok((code::INVALID_VALUE, vec![]));
    assert_eq!(place.call("cuIpcCloseMemHandle", &[place.memory]), none);
    assert_eq!(place.call("cuIpcGetMemHandle", &[64]), none);
}

#[test]
fn an_image_is_for_the_call_behind_it_alone() {
    let mut place = Place::new();
    let graph = place.graph;
    let load = |place: &mut Place| {
        assert_eq!(place.send(own::IMAGE.into(), b"vm-cuda-fake\n\0"), Ok((0, vec![])));
        let (code, loaded) = place.call("cuModuleLoadDataEx", &[0, 0, 0]).expect("a call");
        assert_eq!((code, loaded[0]), (0, 0));
    };
    // The program fetches no text, and loads no image.
    assert_ne!(place.get("cuGraphDebugDotPrint", &[graph, 0]), 0);
    load(&mut place);
    assert_eq!(place.send(own::IMAGE.into(), b"something else"), Ok((0, vec![])));
    assert_eq!(place.call("cuCtxSynchronize", &[]), Ok((0, vec![])));
    load(&mut place);
}
