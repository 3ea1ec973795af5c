//! After validation a compiler fails only with a declared rejection: it gets every kernel there is, with bytes of its
//! binary form changed at random, for every architecture. With a number in `SWEEP_SEED` a third of them is taken, from another
//! one on.

use std::path::Path;
use vm_ir::arbitrary::{self, RowShapes, TileShapes, kernel, row_kernel, tile_kernel};
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::{Trust, text, validate};
use vm_jit::backend::ptx::{Arch, Options};
use vm_jit::{Artifact, Target, compile};

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What part of them is taken, if not all.
fn part() -> Option<u64> {
    std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse().unwrap())
}

#[test]
fn changed_kernels_compile_or_are_rejected() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut seeds = Vec::new();
    for folder in
        ["../vm-ir/filetests/run", "../vm-ir/filetests/tile", "filetests/ptx"].map(|seeds| folder.join(seeds))
    {
        for entry in std::fs::read_dir(folder).unwrap() {
            let module = text::parse(&std::fs::read_to_string(entry.unwrap().path()).unwrap()).unwrap();
            seeds.push(encode(&module, Lines::Strip));
        }
    }
    let archs: Vec<Arch> = Arch::all().collect();
    let host: Option<Target> = "cpu".parse().ok();
    let part = part();
    let mut state = part.map_or(1, |seed| seed.wrapping_add(1));
    let (mut compiled, mut rejected) = (0, 0);
    let rounds = if part.is_some() { 10_000 } else { 30_000 };
    for round in 0..rounds {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..1 + random(&mut state) % 3 {
            let at = 8 + random(&mut state) as usize % (bytes.len() - 8);
            bytes[at] = match random(&mut state) % 3 {
                0 => random(&mut state) as u8,
                1 => bytes[at].wrapping_add(1),
                _ => bytes[random(&mut state) as usize % bytes.len()],
            };
        }
        let Ok(module) = decode(&bytes) else { continue };
        let trust = if random(&mut state).is_multiple_of(2) { Trust::Guest } else { Trust::Trusted };
        let Ok(valid) = validate(module, trust) else { continue };
        let arch = archs[random(&mut state) as usize % archs.len()];
        // Machine code takes longest to make, so it is made of fewer.
        let target = match &host {
            Some(host) if round % 64 == 0 => host.clone(),
            _ => Target::Ptx(Options::new(arch)),
        };
        match compile(&valid, &target) {
            Ok(artifact) => {
                compiled += 1;
                assert_eq!(Artifact::from_bytes(&artifact.to_bytes()), Some(artifact));
            }
            Err(_) => rejected += 1,
        }
    }
    println!("{compiled} compiled, {rejected} rejected");
    assert!(compiled > rounds / 30, "{compiled}");
}

/// Random kernels, as a guest's and as the host's own, for every architecture in turn.
#[test]
fn random_kernels_compile_or_are_rejected() {
    let archs: Vec<Arch> = Arch::all().collect();
    let mut compiled = 0;
    let seeds = part().map_or(0..2000, |seed| seed % 1300..seed % 1300 + 700);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let module = match seed % 4 {
            0 => tile_kernel(seed, TileShapes::Odd).0,
            _ => kernel(seed, arbitrary::Options::default()).0,
        };
        for trust in [Trust::Guest, Trust::Trusted] {
            let Ok(valid) = validate(module.clone(), trust) else { continue };
            let arch = archs[(seed / 4) as usize % archs.len()];
            compiled += u64::from(compile(&valid, &Target::Ptx(Options::new(arch))).is_ok());
        }
    }
    println!("{compiled} compiled");
    assert!(compiled > count / 2, "{compiled}");
}

/// Random kernels of rows compile for every kind of target.
#[test]
fn random_kernels_of_rows_compile() {
    let targets =
        ["ptx:sm_70", "ptx:sm_90a", "amdgcn:gfx942", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:aarch64"];
    let seeds = part().map_or(0..60, |seed| seed % 60..seed % 60 + 6);
    for (seed, shapes) in seeds.flat_map(|seed| RowShapes::ALL.map(|shapes| (seed, shapes))) {
        let valid = validate(row_kernel("random", seed, shapes).0, Trust::Guest).unwrap();
        for target in targets {
            let compiled = compile(&valid, &target.parse().unwrap());
            assert!(compiled.is_ok(), "seed {seed}, {shapes:?} for {target}: {}", compiled.unwrap_err());
        }
    }
}

/// Most of those with shapes for warp groups' instructions go by these.
#[test]
fn random_tile_kernels_go_by_wgmma() {
    let target: Target = "ptx:sm_90a".parse().unwrap();
    let seeds = part().map_or(0..200, |seed| seed % 200..seed % 200 + 60);
    let count = seeds.end - seeds.start;
    let goes = seeds.filter(|seed| {
        let valid = validate(tile_kernel(*seed, TileShapes::Whole).0, Trust::Guest).unwrap();
        let artifact = compile(&valid, &target).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        artifact.text().is_some_and(|text| text.contains("wgmma") && text.contains("cp.async.bulk"))
    });
    let goes = goes.count() as u64;
    println!("{goes} of {count}");
    assert!(goes * 2 > count, "{goes} of {count}");
}
