//! Random kernels are valid, survive both forms, and run.

use std::collections::HashSet;
use vm_ir::arbitrary::{Options, RowShapes, TileShapes, kernel, row_kernel, tile_kernel};
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::interp::{BoundsCounter, Limits, observe, run};
use vm_ir::op::Opcode;
use vm_ir::{Trust, text, validate};

#[test]
fn random_kernels_are_valid_and_run() {
    let mut ops = HashSet::new();
    for seed in 0..300 {
        let options = Options { inexact: seed % 2 == 0, ..Options::default() };
        let (module, mut launch) = kernel(seed, options);
        let printed = text::print(&module);
        let valid =
            validate(module.clone(), Trust::Guest).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{printed}"));
        assert_eq!(valid.kernels().len(), 1, "seed {seed}: the builder refused it");
        assert_eq!(text::parse(&printed).as_ref(), Ok(&module), "seed {seed}");
        assert_eq!(decode(&encode(&module, Lines::Strip)).as_ref(), Ok(&module), "seed {seed}");
        module.kernels()[0].for_each_op(&mut |op| {
            ops.insert(op.code);
        });

        let mut again = launch.clone();
        run(&valid, &mut launch, &Limits::default())
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{printed}"));
        run(&valid, &mut again, &Limits { races: false, ..Limits::default() }).unwrap();
        assert_eq!(launch, again, "seed {seed} has two results");
        assert_eq!(kernel(seed, options).0, module, "seed {seed} gives two kernels");
    }
    let threads = vm_ir::op::TABLE.iter().map(|row| row.opcode).filter(|op| !of_tiles(*op));
    let missing: Vec<_> = threads.filter(|op| !ops.contains(op)).collect();
    // Ids and atomics that a random kernel has no use for, and what has no single result.
    assert!(missing.len() <= 14, "never made: {missing:?}");
}

fn of_tiles(op: Opcode) -> bool {
    op.shape().is_tile() || op == Opcode::ForCluster
}

#[test]
fn random_tile_kernels_are_valid_and_run() {
    let mut ops = HashSet::new();
    let whole = (0..30).map(|seed| (seed, TileShapes::Whole));
    for (seed, shapes) in (0..300).map(|seed| (seed, TileShapes::Odd)).chain(whole) {
        let (module, mut launch) = tile_kernel(seed, shapes);
        let printed = text::print(&module);
        let valid =
            validate(module.clone(), Trust::Guest).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{printed}"));
        assert_eq!(valid.kernels().len(), 1, "seed {seed}: the builder refused it");
        assert_eq!(text::parse(&printed).as_ref(), Ok(&module), "seed {seed}");
        assert_eq!(decode(&encode(&module, Lines::Strip)).as_ref(), Ok(&module), "seed {seed}");
        module.kernels()[0].for_each_op(&mut |op| {
            ops.insert(op.code);
        });
        run(&valid, &mut launch, &Limits::default())
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{printed}"));
        assert_eq!(tile_kernel(seed, shapes).0, module, "seed {seed} gives two kernels");
    }
    let tiles = vm_ir::op::TABLE.iter().map(|row| row.opcode).filter(|op| of_tiles(*op));
    let missing: Vec<_> = tiles.filter(|op| !ops.contains(op)).collect();
    assert!(missing.is_empty(), "never made: {missing:?}");
}

#[test]
fn random_kernels_of_rows_are_valid_and_run() {
    let mut outside = 0;
    for (seed, shapes) in (0..300).flat_map(|seed| RowShapes::ALL.map(|shapes| (seed, shapes))) {
        let (module, mut launch) = row_kernel("random", seed, shapes);
        let printed = text::print(&module);
        let valid = validate(module.clone(), Trust::Guest)
            .unwrap_or_else(|e| panic!("seed {seed}, {shapes:?}: {e}\n{printed}"));
        assert_eq!(valid.kernels().len(), 1, "seed {seed}, {shapes:?}: the builder refused it");
        assert_eq!(text::parse(&printed).as_ref(), Ok(&module), "seed {seed}, {shapes:?}");
        let mut counter = BoundsCounter::default();
        observe(&valid, &mut launch, &Limits::default(), &mut counter)
            .unwrap_or_else(|e| panic!("seed {seed}, {shapes:?}: {e}\n{printed}"));
        outside += usize::from(!counter.found().is_empty());
        assert_eq!(row_kernel("random", seed, shapes).0, module, "seed {seed}, {shapes:?} gives two kernels");
    }
    assert!(outside > 600, "only {outside} have accesses out of bounds");
}
