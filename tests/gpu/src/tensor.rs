//! Kernels that copy boxes by tensor maps, which the queue makes from views.
#![allow(unsafe_code)]

use anyhow::ensure;
use vm_accel::{
    Accelerator, Artifact, Element, Error, Extent, Parameter, ParameterKind, Signature, Swizzle, Tile,
    arguments,
};

use crate::gpu::{Gpu, TIMEOUT};
use crate::skip::skip;

/// Rows and columns of the box, of `u32`: 128 bytes a row.
const BOX: [u32; 2] = [8, 32];
/// Its elements.
pub(crate) const ELEMENTS: usize = 256;

/// `box(x [u32; ?, ?], output [u32; 256], column i32, row i32)`: the box at a column and a row, as it lies in shared
/// memory.
const SOURCE: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .global .align 64 .b8 vir$nothing[128];
.visible .entry box(.param .align 64 .b8 args[184])
.reqntid 32, 1, 1
{
    .reg .b64 %map, %out;
    .reg .b32 %thread, %column, %row, %tile, %barrier, %at, %value, %i;
    .reg .pred %p;
    .shared .align 1024 .b8 tile[1024];
    .shared .align 8 .b64 barrier;
    mov.b64 %map, args;
    cvta.param.u64 %map, %map;
    ld.param.b64 %out, [args+160];
    cvta.to.global.u64 %out, %out;
    ld.param.b32 %column, [args+176];
    ld.param.b32 %row, [args+180];
    mov.u32 %thread, %tid.x;
    mov.u32 %tile, tile;
    mov.u32 %barrier, barrier;
    setp.ne.u32 %p, %thread, 0;
    @%p bra wait;
    mbarrier.init.shared.b64 [%barrier], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 _, [%barrier], 1024;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%tile], [%map, {%column, %row}], [%barrier];
wait:
    bar.sync 0;
again:
    mbarrier.try_wait.parity.shared.b64 %p, [%barrier], 0;
    @!%p bra again;
    shl.b32 %at, %thread, 2;
    cvt.u64.u32 %map, %at;
    add.u64 %out, %out, %map;
    add.u32 %at, %at, %tile;
    mov.u32 %i, 0;
next:
    ld.shared.b32 %value, [%at];
    st.global.b32 [%out], %value;
    add.u32 %at, %at, 128;
    add.u64 %out, %out, 128;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, 8;
    @%p bra next;
    ret;
}
";

pub(crate) fn artifact(swizzle: Swizzle) -> vm_accel::Result<Artifact> {
    let view = |name: &str, extents, writes| Parameter {
        name: name.into(),
        kind: ParameterKind::View { extents, element: Element::U32, align: 16, writes },
    };
    let scalar =
        |name: &str| Parameter { name: name.into(), kind: ParameterKind::Scalar { bytes: 4, range: None } };
    let signature = Signature {
        entry: "box".into(),
        block: [32, 1, 1],
        cluster: 1,
        shared_bytes: 0,
        parameters: vec![
            view("x", vec![Extent::Any; 2], false),
            view("output", vec![Extent::Fixed(ELEMENTS as u64)], true),
            scalar("column"),
            scalar("row"),
        ],
        tiles: vec![Tile { parameter: 0, shape: BOX, swizzle, element: Element::U32, writes: false }],
        guarded: false,
        cost_bound: 1000,
    };
    // SAFETY: it writes the 256 elements of its second view, and reads its first by the map alone.
    unsafe { Artifact::new(SOURCE.as_bytes(), signature) }
}

/// What of a matrix of numbered elements the kernel must find at a column and a row.
pub(crate) fn wanted(rows: u32, columns: u32, at: [i32; 2], swizzle: Swizzle) -> Vec<u32> {
    let [row, column] = at;
    (0..ELEMENTS as u32)
        .map(|index| {
            let (y, mut x) = (index / BOX[1], index % BOX[1]);
            if swizzle == Swizzle::Bytes128 {
                x = ((x / 4) ^ (y % 8)) * 4 + x % 4;
            }
            let (y, x) = (row + y as i32, column + x as i32);
            let inside = (0..rows as i32).contains(&y) && (0..columns as i32).contains(&x);
            if inside { 1 + y as u32 * columns + x as u32 } else { 0 }
        })
        .collect()
}

/// Ends a test as skipped on a device without tensor maps.
pub(crate) fn needs_tma(gpu: &Gpu) -> anyhow::Result<()> {
    let target = &gpu.accelerator.info().target;
    if target.strip_prefix("sm_").and_then(|number| number.parse().ok()).is_none_or(|number: u32| number < 90)
    {
        return skip(format!("{target} has no Tensor Memory Accelerator"));
    }
    Ok(())
}

/// That boxes come as they lie in the view: inside, over its edges, of a view without elements, by launches one by one and in graphs that are amended.
pub(crate) fn boxes(gpu: &Gpu) -> anyhow::Result<()> {
    needs_tma(gpu)?;
    let worker = gpu.worker()?;
    const SHAPES: [[u32; 2]; 5] = [[24, 40], [16, 64], [3, 4], [0, 8], [5, 0]];
    const PLACES: [[i32; 2]; 4] = [[0, 0], [8, 4], [-2, -4], [20, 36]];
    let mut views = Vec::new();
    for [rows, columns] in SHAPES {
        // Of a view without elements there is memory all the same.
        let numbers: Vec<u32> = (1..=(rows * columns).max(4)).collect();
        let x = worker.allocate(4 * numbers.len() as u64)?;
        worker.write(&x, &numbers)?;
        views.push(x);
    }
    let all = || {
        let shapes = views.iter().zip(SHAPES);
        shapes.flat_map(|(x, shape)| PLACES.map(|at| (x, shape, at))).enumerate()
    };
    let count = SHAPES.len() * PLACES.len();
    for swizzle in [Swizzle::None, Swizzle::Bytes128] {
        let kernel = worker.load(&artifact(swizzle)?)?;
        let output = worker.allocate(4 * (count * ELEMENTS) as u64)?;
        let part = |index: usize| output.view(4 * (index * ELEMENTS) as u64, 4 * ELEMENTS as u64);
        let check = |how: &str| -> anyhow::Result<()> {
            let mut found = vec![0u32; count * ELEMENTS];
            worker.read(&output, &mut found)?;
            for (index, (_, [rows, columns], at)) in all() {
                let found = &found[index * ELEMENTS..][..ELEMENTS];
                let wanted = wanted(rows, columns, at, swizzle);
                ensure!(found == wanted, "{how}: {rows}×{columns} at {at:?}, {swizzle:?}: {found:?}");
            }
            Ok(worker.fill(&output, 0xff)?)
        };
        for (index, (x, [rows, columns], [row, column])) in all() {
            let x = x.shaped(&[rows.into(), columns.into()])?;
            worker.launch(&kernel, 1, &arguments![x, part(index)?, column, row])?;
        }
        check("one by one")?;
        // Of a batch of so many the worker makes a graph, and of the next ones of this shape sets what differs.
        for turn in 0..4 {
            let mut batch = worker.batch();
            for _ in 0..4 {
                for (index, (x, [rows, columns], [row, column])) in all().cycle().skip(turn).take(count) {
                    let x = x.shaped(&[rows.into(), columns.into()])?;
                    batch.launch(&kernel, 1, &arguments![x, part(index)?, column, row])?;
                }
            }
            worker.launch_batch(batch)?;
            check("a batch")?;
        }
        // Rows of 20 bytes can't be described.
        let odd = worker.launch(&kernel, 1, &arguments![views[0].shaped(&[4, 5])?, part(0)?, 0i32, 0i32]);
        ensure!(matches!(&odd, Err(Error::Arguments { parameter, .. }) if parameter == "x"), "{odd:?}");
        drop((output, kernel));
    }
    drop(views);
    Ok(worker.stop(TIMEOUT)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_lie_where_the_kernel_looks() {
        let artifact = artifact(Swizzle::Bytes128).unwrap();
        let params = artifact.params();
        assert_eq!((params.align(), params.bytes, params.maps[0].offset), (64, 184, 0));
        assert_eq!(params.slots.iter().map(|slot| slot.offset()).collect::<Vec<_>>(), [128, 160, 176, 180]);
    }
}
