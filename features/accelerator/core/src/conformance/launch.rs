//! Launches: views, scalars, shared memory, grids.

use std::sync::Arc;

use vm_abi::{MAX_EXTENT, MAX_GRID, MAX_RANK};

use super::{Programs, TIMEOUT, numbers, soon, start, stop};
use crate::accelerator::{Accelerator, Queue};
use crate::arguments;
use crate::artifact::{Artifact, Extent, ParameterKind, Signature};
use crate::device::QueueOptions;
use crate::error::Error;
use crate::extents::Extents;
use crate::launch::{Arguments, Grid, QueueArgument};
use crate::memory::MemoryKind;
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{Argument, Kernel};

pub(super) fn by_hand<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let program = programs(Program::Add);
    let kernel = queue.load(&program).expect("the program loads");
    let memory = queue.allocate(MemoryKind::Pinned, 8).expect("memory");
    let [input, output] = [0, 4].map(|offset| memory.region().slice(offset, 4).expect("a part"));
    input.write_host(&41u32.to_le_bytes()).expect("a write");
    let view = |region| QueueArgument::View(region, Extents::WHOLE);
    let arguments = [view(input), view(output), QueueArgument::Scalar(1u32.into())];
    let packed = Arguments::new(&program, arguments).expect("the arguments fit");
    let done = queue.event(false).expect("an event");
    // SAFETY: the memory is freed below, by the same queue.
    #[allow(unsafe_code)]
    unsafe { queue.launch(&kernel, Grid::from(1), &packed) }.expect("a launch");
    queue.record(&done).expect("a record");
    queue.wait(&done, soon()).expect("the kernel ends");
    let mut sum = [0; 4];
    output.read_host(&mut sum).expect("a read");
    assert_eq!(u32::from_le_bytes(sum), 42);
    queue.unload(kernel).expect("an unload");
    queue.free(memory).expect("a free");
}

pub(super) fn grids<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Bump)).expect("the program loads");
    let values = numbers(10_007);
    let data = worker.allocate(4 * 10_007).expect("memory");
    worker.write(&data, &values).expect("a write");
    let grids = [[1, 1, 1], [40, 1, 1], [1000, 1, 1], [3, 5, 1], [2, 3, 4], [1, 1, 7], [65_535, 1, 1]];
    for grid in grids {
        worker.launch(&kernel, grid, &arguments![&data, 3u32]).expect("a launch");
    }
    let mut back = vec![0u32; values.len()];
    worker.read(&data, &mut back).expect("a read");
    let want = |value: &u32| value.wrapping_add(3 * grids.len() as u32);
    assert!(values.iter().zip(&back).all(|(value, sum)| want(value) == *sum));
    drop(data);
    stop(&worker);
}

/// Launches that violate an assumption of compilers (`vm_jit::range::assumed`) are rejected, and the device still works.
pub(super) fn refused<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let [data, other] = [0; 2].map(|_| worker.allocate(4096).expect("memory"));
    let part = |offset, bytes| data.view(offset, bytes).expect("a view");
    let shaped = |offset, bytes, extents: &[u64]| part(offset, bytes).shaped(extents).expect("extents");
    let with = |program: Program, change: &dyn Fn(&mut Signature)| {
        let made = programs(program);
        let mut signature = made.signature().clone();
        change(&mut signature);
        // SAFETY: it takes the same parameters as before, of fewer values.
        #[allow(unsafe_code)]
        let narrowed = unsafe { Artifact::new(made.image(), signature) }.expect("a signature");
        worker.load(&narrowed).expect("the program loads")
    };
    let check = |what: &str, kernel: &Kernel<A>, grid: [u32; 3], arguments: &[Argument<'_, A>]| {
        let launched = worker.launch(kernel, grid, arguments);
        assert!(
            matches!(launched, Err(Error::Grid { .. } | Error::Arguments { .. })),
            "{what}: {launched:?}"
        );
    };
    fn extents(signature: &mut Signature, index: usize) -> &mut [Extent] {
        match &mut signature.parameters[index].kind {
            ParameterKind::View { extents, .. } => extents,
            _ => unreachable!("a scalar"),
        }
    }
    let plain = with(Program::Bump, &|_| {});
    let (one, good) = ([1; 3], arguments![part(0, 64), 1u32]);
    for (axis, most) in MAX_GRID.into_iter().enumerate() {
        for size in [0, most + 1, u32::MAX] {
            let mut grid = one;
            grid[axis] = size;
            check("the grid", &plain, grid, &good);
        }
    }
    let clusters = with(Program::Bump, &|signature| signature.cluster = 4);
    check("clusters", &clusters, [6, 1, 1], &good);
    let rows = with(Program::Copy2, &|_| {});
    let target = other.shaped(&[4, 4]).expect("extents");
    for wrong in [[MAX_EXTENT + 1, 0], [0, MAX_EXTENT + 1], [u64::MAX, 0]] {
        check("extents", &rows, one, &arguments![shaped(0, 64, &wrong), target]);
    }
    let fixed = with(Program::Copy2, &|signature| extents(signature, 0)[1] = Extent::Fixed(4));
    for wrong in [[4, 3], [4, 5], [4, 0]] {
        check("fixed extents", &fixed, one, &arguments![shaped(0, 128, &wrong), target]);
    }
    let multiple = with(Program::Copy2, &|signature| extents(signature, 0)[1] = Extent::Multiple(4));
    check("multiples", &multiple, one, &arguments![shaped(0, 128, &[4, 6]), target]);
    let named = with(Program::Copy2, &|signature| {
        extents(signature, 1)[1] = Extent::Same { parameter: 0, dimension: 1 };
    });
    check("named extents", &named, one, &arguments![shaped(0, 128, &[4, 5]), target]);
    let ranged = with(Program::Bump, &|signature| {
        signature.parameters[1].kind = ParameterKind::Scalar { bytes: 4, range: Some((-1, 8)) };
    });
    for wrong in [9u32, -2i32 as u32, i32::MIN as u32] {
        check("ranges of scalars", &ranged, one, &arguments![part(0, 64), wrong]);
    }
    check("an address's alignment", &plain, one, &arguments![part(2, 8), 1u32]);
    let strided = |strides: &[u64]| data.strided(&[2, 4], strides).expect("extents");
    check("a stride's alignment", &rows, one, &arguments![strided(&[18]), target]);
    for wrong in [4096, 4084, !3, 1 << 63] {
        check("memory", &rows, one, &arguments![strided(&[wrong]), target]);
    }
    check("memory", &rows, one, &arguments![shaped(0, 64, &[4, 5]), target]);
    check("memory", &rows, one, &arguments![shaped(0, 64, &[MAX_EXTENT, MAX_EXTENT]), target]);
    check("views apart", &rows, one, &arguments![shaped(0, 64, &[4, 4]), shaped(60, 64, &[4, 4])]);
    let target = other.strided(&[4, 4], &[8]).expect("extents");
    check("rows apart", &rows, one, &arguments![shaped(0, 64, &[4, 4]), target]);
    worker.launch(&plain, 1, &good).expect("a launch");
    worker.synchronize(TIMEOUT).expect("a wait");
    drop((data, other));
    stop(&worker);
}

/// A view of one test: extents, and the distance of neighbours in each dimension in elements.
struct Strided {
    extents: Vec<u64>,
    steps: Vec<u64>,
}

impl Strided {
    /// Rows with `pad` elements between them.
    fn padded(extents: &[u64], pad: u64) -> Self {
        let mut steps = vec![1; extents.len()];
        for dimension in (1..extents.len()).rev() {
            steps[dimension - 1] = steps[dimension] * extents[dimension] + pad;
        }
        Self { extents: extents.to_vec(), steps }
    }

    fn elements(&self) -> u64 {
        1 + self.extents.iter().zip(&self.steps).map(|(extent, step)| (extent - 1) * step).sum::<u64>()
    }

    fn strides(&self) -> Vec<u64> {
        self.steps[..self.steps.len() - 1].iter().map(|step| 4 * step).collect()
    }

    fn at(&self, index: &[u64]) -> usize {
        index.iter().zip(&self.steps).map(|(index, step)| index * step).sum::<u64>() as usize
    }
}

pub(super) fn ranks<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    const BLANK: u32 = 0xeeee_eeee;
    let worker = start(accelerator, PoolOptions::default());
    let pitch = |extents: &[u64], pad| Strided::padded(extents, pad);
    let cases = [
        (Program::Copy2, pitch(&[5, 7], 0), pitch(&[5, 7], 0)),
        (Program::Copy2, pitch(&[130, 70], 3), pitch(&[130, 70], 5)),
        (Program::Copy2, pitch(&[9, 4], 1), pitch(&[4, 9], 2)),
        // Columns become rows: the stride is shorter than what a row reaches.
        (Program::Copy2, Strided { extents: vec![6, 1], steps: vec![1, 1] }, pitch(&[6, 1], 4)),
        // One row, given to all.
        (Program::Copy2, Strided { extents: vec![8, 33], steps: vec![0, 1] }, pitch(&[8, 33], 0)),
        (Program::Copy3, pitch(&[3, 4, 65], 2), pitch(&[3, 4, 65], 1)),
        (Program::Copy3, pitch(&[2, 5, 3], 0), pitch(&[4, 2, 8], 3)),
        // Planes lie within each other's rows.
        (Program::Copy3, Strided { extents: vec![4, 3, 2], steps: vec![2, 8, 1] }, pitch(&[4, 3, 2], 0)),
        (Program::Copy4, pitch(&[2, 3, 4, 5], 1), pitch(&[2, 3, 4, 5], 7)),
        (Program::Copy4, pitch(&[1, 1, 1, 1], 0), pitch(&[3, 2, 1, 9], 0)),
    ];
    for (program, source, target) in cases {
        let kernel = worker.load(&programs(program)).expect("the program loads");
        let values = numbers(source.elements() as u32);
        let input = worker.allocate(4 * source.elements()).expect("memory");
        let output = worker.allocate(4 * target.elements()).expect("memory");
        worker.write(&input, &values).expect("a write");
        worker.fill(&output, 0xee).expect("a fill");
        let views = arguments![
            input.strided(&source.extents, &source.strides()).expect("extents"),
            output.strided(&target.extents, &target.strides()).expect("extents"),
        ];
        worker.launch(&kernel, 3, &views).expect("a launch");
        let mut back = vec![0u32; target.elements() as usize];
        worker.read(&output, &mut back).expect("a read");

        let rank = source.extents.len();
        let mut want = vec![BLANK; back.len()];
        let mut limits = [1; MAX_RANK];
        for (limit, (from, to)) in limits.iter_mut().zip(source.extents.iter().zip(&target.extents)) {
            *limit = *from.min(to);
        }
        for number in 0..limits.iter().product::<u64>() {
            let mut index = [0; MAX_RANK];
            let mut left = number;
            for (place, limit) in index.iter_mut().zip(limits).rev() {
                *place = left % limit;
                left /= limit;
            }
            want[target.at(&index[..rank])] = values[source.at(&index[..rank])];
        }
        let first = back.iter().zip(&want).position(|(got, want)| got != want);
        assert!(first.is_none(), "{}, {:?}: element {first:?}", program.name(), target.extents);
    }
    // Rows one behind the other need no strides.
    let kernel = worker.load(&programs(Program::Copy3)).expect("the program loads");
    let (input, output) =
        (worker.allocate(4 * 60).expect("memory"), worker.allocate(4 * 60).expect("memory"));
    worker.write(&input, &numbers(60)).expect("a write");
    let shape = [3, 4, 5];
    let views = arguments![input.shaped(&shape).expect("extents"), output.shaped(&shape).expect("extents")];
    worker.launch(&kernel, 1, &views).expect("a launch");
    let mut back = [0u32; 60];
    worker.read(&output, &mut back).expect("a read");
    assert_eq!(back[..], numbers(60));
    drop((input, output));
    stop(&worker);
}

pub(super) fn empty<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let data = worker.allocate_zeroed(64).expect("memory");
    let none = data.view(64, 0).expect("a view of nothing");
    worker.fill(none, 9).expect("a fill of nothing");
    worker.copy(none, data.view(0, 0).expect("a view of nothing")).expect("a copy of nothing");
    worker.write::<u8>(none, &[]).expect("a write of nothing");
    worker.read::<u8>(none, &mut []).expect("a read of nothing");
    let bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    worker.launch(&bump, 2, &arguments![none, 1u32]).expect("a launch over nothing");
    let copy = worker.load(&programs(Program::Copy2)).expect("the program loads");
    let views = arguments![
        data.view(0, 32).and_then(|view| view.shaped(&[0, 8])).expect("extents"),
        data.view(32, 32).and_then(|view| view.shaped(&[1, 8])).expect("extents"),
    ];
    worker.launch(&copy, 2, &views).expect("a launch over no rows");
    let mut bytes = [1u8; 64];
    worker.read(&data, &mut bytes).expect("a read");
    assert_eq!(bytes, [0; 64]);
    drop(data);
    stop(&worker);
}

pub(super) fn scalars<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Scalars)).expect("the program loads");
    let output = worker.allocate(32).expect("memory");
    let cases = [
        (0, 0, 0, 0),
        (u8::MAX, u16::MAX, u32::MAX, u64::MAX),
        (0x12, 0x3456, 0x789a_bcde, 0x0123_4567_89ab_cdef),
        (0x80, 0x8000, 0x8000_0000, 1 << 63),
        (1, 0, u32::MAX, 0),
    ];
    for (a, b, c, d) in cases {
        worker.launch(&kernel, 1, &arguments![&output, a, b, c, d]).expect("a launch");
        let mut back = [0u64; 4];
        worker.read(&output, &mut back).expect("a read");
        assert_eq!(back, [u64::from(a), u64::from(b), u64::from(c), d]);
    }
    let floats = arguments![&output, -1i8, -2i16, 1.5f32, -2.5f64];
    worker.launch(&kernel, 1, &floats).expect("a launch");
    let mut back = [0u64; 4];
    worker.read(&output, &mut back).expect("a read");
    assert_eq!(back, [0xff, 0xfffe, u64::from(1.5f32.to_bits()), (-2.5f64).to_bits()]);
    drop(output);
    stop(&worker);
}

pub(super) fn shared<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    const BLOCKS: u32 = 100;
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Reverse)).expect("the program loads");
    let mut values = numbers(64 * BLOCKS);
    let data = worker.allocate(4 * 64 * u64::from(BLOCKS)).expect("memory");
    worker.write(&data, &values).expect("a write");
    worker.launch(&kernel, BLOCKS, &arguments![&data]).expect("a launch");
    let mut back = vec![0u32; values.len()];
    worker.read(&data, &mut back).expect("a read");
    values.chunks_exact_mut(64).for_each(<[u32]>::reverse);
    assert!(values == back, "each block has shared memory of its own");
    let odd = worker.launch(&kernel, 1, &arguments![data.view(0, 4 * 63).expect("a view")]);
    assert!(odd.is_err_and(|error| error.to_string().contains("a multiple of 64")));
    drop(data);
    stop(&worker);
}

pub(super) fn ids<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Ids)).expect("the program loads");
    for [gx, gy, gz] in [[1, 1, 1], [5, 1, 1], [1, 4, 3], [2, 3, 2], [15, 15, 15]] {
        let blocks = gx * gy * gz;
        let output = worker.allocate(u64::from(blocks) * 64).expect("memory");
        worker.launch(&kernel, [gx, gy, gz], &arguments![&output]).expect("a launch");
        let mut back = vec![0u32; 16 * blocks as usize];
        worker.read(&output, &mut back).expect("a read");
        for (place, got) in (0..).zip(back) {
            let (block, item) = (place / 16, place % 16);
            let (bx, by, bz) = (block % gx, block / gx % gy, block / gx / gy);
            let (tx, ty, tz) = (item % 4, item / 4 % 2, item / 8);
            let want = bx | by << 4 | bz << 8 | tx << 12 | ty << 16 | tz << 20;
            assert_eq!(got, want, "grid {gx}×{gy}×{gz}, block {block}, thread {item}");
        }
    }
    stop(&worker);
}

pub(super) fn jobs<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Bump)).expect("the program loads");
    let data = worker.allocate_kind(MemoryKind::Pinned, 4).expect("memory");
    worker.fill(&data, 0).expect("a fill");
    let jobs: Vec<_> =
        (0..50).map(|_| worker.launch_job(&kernel, 1, &arguments![&data, 2u32]).expect("a launch")).collect();
    for job in jobs {
        job.wait(soon()).expect("the kernel ends");
    }
    let mut sum = [0u32];
    worker.read(&data, &mut sum).expect("a read");
    assert_eq!(sum, [100]);
    // From a job on the worker itself.
    let inner = worker.clone();
    let arguments = arguments![&data, 1u32];
    let job = worker.submit_and_wait(soon(), |_| inner.launch_job(&kernel, 1, &arguments));
    job.expect("a launch").wait(soon()).expect("the kernel ends");
    worker.read(&data, &mut sum).expect("a read");
    assert_eq!(sum, [101]);
    worker.synchronize(TIMEOUT).expect("nothing failed");
    drop(data);
    stop(&worker);
}

pub(super) fn batches<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    let add = worker.load(&programs(Program::Add)).expect("the program loads");
    let (data, copy) = (worker.allocate(400).expect("memory"), worker.allocate(400).expect("memory"));
    let mut values = [0u32; 100];
    // Each length twice: what came before may be kept. The last has more launches than any graph.
    for launches in [1u32, 2, 5, 16, 64, 65, 300].into_iter().flat_map(|launches| [launches; 2]) {
        worker.fill(&data, 0).expect("a fill");
        let mut batch = worker.batch();
        assert!(batch.is_empty());
        (0..launches).for_each(|by| {
            batch.launch(&bump, 1, &arguments![&data, by]).expect("the arguments fit");
        });
        // What does not fit is refused, and not in it.
        let refused = batch.launch(&bump, 1, &arguments![&data]);
        assert!(matches!(refused, Err(Error::Arguments { .. })), "{refused:?}");
        assert!(batch.launch(&bump, 0, &arguments![&data, 1u32]).is_err());
        batch.launch(&add, 1, &arguments![&data, &copy, 1u32]).expect("the arguments fit");
        assert_eq!(batch.len(), launches as usize + 1);
        worker.launch_batch(batch).expect("a batch");
        worker.launch(&bump, 1, &arguments![&copy, 1u32]).expect("a launch behind it");
        worker.read(&copy, &mut values).expect("a read");
        assert_eq!(values, [launches * (launches - 1) / 2 + 2; 100], "{launches} launches");
    }
    worker.launch_batch(worker.batch()).expect("an empty one");
    let inline = worker.submit_and_wait(soon(), |session| {
        let mut batch = worker.batch();
        batch.launch(&bump, 1, &arguments![&copy, 1u32])?;
        worker.launch_batch(batch)?;
        session.synchronize(soon())
    });
    assert_eq!(inline, Ok(()));
    let captured = worker.capture(|_| {
        let mut batch = worker.batch();
        batch.launch(&bump, 1, &arguments![&copy, 1u32])?;
        worker.launch_batch(batch)
    });
    assert!(matches!(captured, Err(Error::Capturing { .. })), "{captured:?}");
    let other = start(accelerator, PoolOptions::default());
    let mut foreign = other.batch();
    assert!(matches!(foreign.launch(&bump, 1, &arguments![]), Err(Error::WrongWorker { .. })));
    assert!(matches!(worker.launch_batch(foreign), Err(Error::WrongWorker { .. })));
    stop(&other);
    drop((data, copy));
    stop(&worker);
}

pub(super) fn batches_again<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let mut bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    let mut value = [0u32];
    for round in 0..100u32 {
        // Memory comes and goes, and so do kernels: no graph may run with what is gone.
        let data = worker.allocate_zeroed(4 << (round % 7)).expect("memory");
        if round % 10 == 9 {
            bump = worker.load(&programs(Program::Bump)).expect("the program loads");
        }
        let launches = 17 + round % 3;
        // Without a wait between them.
        for turn in 0..3 {
            let mut batch = worker.batch();
            for by in 0..launches {
                let by = if by % 2 == 0 { round * turn } else { by };
                batch.launch(&bump, 1, &arguments![&data, by]).expect("the arguments fit");
            }
            worker.launch_batch(batch).expect("a batch");
        }
        worker.read(data.view(0, 4).expect("a part"), &mut value).expect("a read");
        let odd: u32 = (0..launches).filter(|by| by % 2 == 1).sum();
        let even = launches.div_ceil(2) * round;
        assert_eq!(value, [3 * odd + 3 * even], "round {round}");
    }
    drop(bump);
    stop(&worker);
}
