//! The tables of variants: every variant of every class compiles for Hopper, and launches what its problem says.

#[path = "common/problems.rs"]
#[allow(dead_code)]
mod problems;

use problems::{EXTENTS, H200, TIGHT, attentions, by_registers, generations, gradients, kinds};
use std::collections::BTreeSet;
use vm_ir::module::ParamKind;
use vm_ir::{GuestAddr, Module, Scalar, Trust, validate};
use vm_kernels::attention::{
    DotProductAttention, DotProductAttentionBackward, Forward, GradientKernels, Gradients, Mask,
};
use vm_kernels::call::{Entry, Function};
use vm_kernels::family::{Kind, Problem, Resources, Sample, Variant, rounded};
use vm_kernels::gemm::{Gemm, Product};

#[test]
fn every_variant_compiles() {
    let target = "ptx:sm_90a".parse().unwrap();
    let mut seen = BTreeSet::new();
    for kind in kinds().into_iter().chain(by_registers()) {
        for [m, n, k] in EXTENTS {
            let problem = Product { m, n, k, ..kind };
            let variants =
                [H200, TIGHT].iter().flat_map(|resources| problem.variants(resources)).collect::<Vec<_>>();
            let name = format!("{} on 132 units", problem.class());
            assert!(!variants.is_empty(), "{name} has no variant");
            for variant in variants {
                if !seen.insert(variant.name()) {
                    continue;
                }
                let kernel = variant.kernel(GuestAddr(0)).unwrap();
                let needed = u64::from(variant.shared_bytes());
                let module = Module::from(kernel);
                let rejects = vm_jit::legal::rejects(&module, &target);
                assert!(rejects.is_empty(), "{name}: {}: {}", variant.name(), rejects[0]);
                let valid = validate(module, Trust::Guest).unwrap();
                let taken = u64::from(vm_jit::compile(&valid, &target).unwrap().entries[0].dynamic_shared);
                // The estimate is not below what the compiler takes, nor far above.
                assert!(
                    (taken..=taken + 4096).contains(&needed),
                    "{}: {needed}, not {taken}",
                    variant.name()
                );
            }
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
fn arguments_fit_the_parameters() {
    for kind in kinds() {
        check_arguments(&Product { m: 520, n: 776, k: 264, ..kind });
    }
    attentions().iter().for_each(check_arguments);
    generations().iter().for_each(check_arguments);
    gradients().iter().for_each(check_arguments);
}

fn check_arguments<P: Problem>(problem: &P) {
    let arguments = problem.arguments();
    for variant in problem.variants(&H200) {
        let (kernels, steps) = (variant.kernels(GuestAddr(0)).unwrap(), problem.steps(&variant, &H200));
        assert_eq!(kernels.len(), steps.len(), "{}", problem.class());
        assert!(kernels.contains(&variant.kernel(GuestAddr(0)).unwrap()), "{}", variant.name());
        assert!(steps.iter().any(|step| step.grid == problem.grid(&variant, &H200)), "{}", variant.name());
        let given = kernels.iter().zip(&steps).flat_map(|(kernel, step)| {
            assert_eq!(kernel.params().len(), step.arguments.len(), "{}", kernel.name());
            kernel.params().iter().zip(&step.arguments).map(move |(param, place)| (kernel, param, place))
        });
        for (kernel, param, place) in given {
            let argument = &arguments[*place];
            let (element, rank) = match argument {
                Sample::Random { element, extents } => (*element, extents.len()),
                Sample::Values(tensor) => (tensor.element, tensor.extents.len()),
                Sample::Number(_, ty) => {
                    let ParamKind::Scalar { value, .. } = param.kind else {
                        panic!("{param:?} is given a number")
                    };
                    assert_eq!(kernel.type_of(value), *ty, "{param:?}");
                    continue;
                }
            };
            let ParamKind::View(view) = &param.kind else { panic!("{param:?} is given a view") };
            assert_eq!((view.element, view.rank()), (element, rank), "{}: {}", problem.class(), param.name);
        }
    }
}

/// All variants compile for Hopper, take as much shared memory as is said, and have names of their own. Kernels whose names were `seen` are not
/// compiled again. An estimate is not below what is taken, and no more than `spare` bytes above.
fn check_variants<P: Problem>(
    problem: &P,
    seen: &mut BTreeSet<String>,
    spare: u32,
    shared_bytes: impl Fn(&P::Variant) -> u32,
) {
    let target = "ptx:sm_90a".parse().unwrap();
    for resources in [H200, TIGHT] {
        let mut names = BTreeSet::new();
        for variant in problem.variants(&resources) {
            let name = variant.name();
            assert!(names.insert(name.clone()), "{name} is there twice");
            assert!(shared_bytes(&variant) <= resources.shared_bytes, "{name}");
            for step in problem.steps(&variant, &resources) {
                assert!(!step.grid.contains(&0), "{name}: {step:?}");
            }
            if !seen.insert(name.clone()) {
                continue;
            }
            let kernels = variant.kernels(GuestAddr(0)).unwrap();
            let mut taken = 0;
            for kernel in kernels {
                let valid = validate(Module::from(kernel), Trust::Guest).unwrap();
                let artifact = vm_jit::compile(&valid, &target).unwrap_or_else(|error| panic!("{error}"));
                let entry = &artifact.entries[0];
                taken = taken.max(entry.dynamic_shared);
                // Of f32 alone no variant goes by `wgmma`.
                for note in entry.products.iter().flat_map(|products| &products.fallback) {
                    assert!(note.what.contains("f32 has no products"), "{name}: {}", note.what);
                }
            }
            let estimate = shared_bytes(&variant);
            assert!((taken..=taken + spare).contains(&estimate), "{name}: {estimate}, not {taken}");
        }
        let least = if resources == H200 { 2 } else { 1 };
        assert!(names.len() >= least, "{}: {names:?}", problem.class());
    }
    assert!(problem.operations() > 0.0);
}

#[test]
fn variants_of_attention_compile() {
    let (mut classes, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for problem in attentions() {
        check_variants(&problem, &mut seen, 4096, |variant| variant.shared_bytes());
        assert!(classes.insert((problem.family().to_owned(), problem.class())), "{}", problem.class());
    }
    for problem in generations() {
        check_variants(&problem, &mut seen, 4096, |variant| variant.shared_bytes());
        assert!(classes.insert((problem.family().to_owned(), problem.class())), "{}", problem.class());
    }
    for problem in gradients() {
        // What its kernels store on their way is counted in full.
        check_variants(&problem, &mut seen, 24 << 10, |variant| variant.shared_bytes() as u32);
        assert!(classes.insert((problem.family().to_owned(), problem.class())), "{}", problem.class());
    }
    // A query sees half of as many keys, on average.
    let [full, causal] = [false, true].map(|causal| Forward::of(1, 1, 1000, 64, causal).operations());
    assert_eq!(full, 2.0 * causal);
}

/// A call of the library takes what the table has first, and packed sequences are measured with lengths of all kinds.
#[test]
fn calls_take_the_first_of_the_gradients() {
    let cpu = Resources { kind: Kind::Cpu, ..H200 };
    for problem in gradients().into_iter().filter(|problem| !problem.packed && problem.dim != 192) {
        let Gradients { element, dim, mask, window, batch, heads, tokens, .. } = problem;
        let of = DotProductAttention {
            element,
            fp8: None,
            batch,
            heads,
            lengths: tokens,
            dim: dim.into(),
            mask,
            window,
            bias: false,
            log_sums: true,
            scale: 1.0,
            align: 16,
        };
        for resources in [H200, TIGHT, cpu] {
            let call = DotProductAttentionBackward(of).call(&resources).unwrap();
            let taken = call.launches.iter().find_map(|launch| match launch.entry {
                Entry::AttentionBackward(variant, _) => Some(GradientKernels::Together(variant)),
                Entry::AttentionGradient(variant, _) => Some(GradientKernels::Apart(variant)),
                _ => None,
            });
            assert_eq!(taken, problem.variants(&resources).first().copied(), "{}", problem.class());
        }
    }
    let packed = Forward { packed: true, heads: [2, 1], ..Forward::of(4, 2, 1000, 64, false) };
    let starts = packed.arguments().into_iter().find_map(|sample| match sample {
        Sample::Values(tensor) => Some(tensor.to_f64s()),
        _ => None,
    });
    assert_eq!(starts, Some(vec![0.0, 625.0, 1375.0, 2250.0, 3250.0]));
    let squares: f64 = [625.0, 750.0, 875.0, 1000.0].iter().map(|length| length * length).sum();
    assert_eq!(packed.operations(), 4.0 * 64.0 * 2.0 * squares);
    let of = Gradients { packed: true, heads: [2, 1], ..Gradients::of(4, 2, 1000, 64, false) };
    assert_eq!(of.operations(), 2.5 * packed.operations());
    assert_eq!(of.class(), "full_bf16_d64_packed_8by2_1024x1024");
    let window = Gradients { mask: Mask::Window, window: [128, 0], packed: false, ..of };
    assert_eq!(window.class(), "window_128_1_bf16_d64_8by2_1024x1024");
}

#[test]
fn the_first_guess_is_what_was_fastest() {
    let check = |problem: Product, tile: [u32; 3], stages| {
        let first: Gemm = problem.variants(&H200)[0];
        assert_eq!((first.tile, first.stages), (tile, stages), "{}", problem.class());
    };
    check(Product::of(8192, 8192, 8192), [256, 128, 64], 3);
    check(Product::of(2048, 2048, 2048), [128, 256, 64], 3);
    check(Product::of(1024, 1024, 1024), [64, 128, 64], 4);
    check(Product::of(512, 512, 512), [64, 64, 128], 3);
    check(Product::of(16, 4096, 4096), [16, 64, 256], 4);
    let tf32 = Product {
        element: Scalar::Tf32,
        output: Scalar::F32,
        b_transposed: true,
        ..Product::of(8192, 8192, 8192)
    };
    assert_eq!(tf32.variants(&H200)[0].tile[2], 32);
    // What has less shared memory has what fits it.
    let variants = Product::of(8192, 8192, 8192).variants(&TIGHT);
    let fits = |variant: &Gemm| variant.shared_bytes() <= TIGHT.shared_bytes;
    assert!(!variants.is_empty() && variants.iter().all(fits), "{variants:?}");
}

#[test]
fn classes_are_what_problems_share() {
    for (extent, wanted) in
        [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (4096, 4096), (4097, 6144), (11008, 12288)]
    {
        assert_eq!(rounded(extent), wanted, "{extent}");
    }
    assert!(rounded(u64::MAX) >= 1 << 62);
    let class = |problem: Product| problem.class();
    let plain = Product::of(4096, 11008, 4000);
    assert_eq!(class(plain), "nn_bf16_bf16_4096x12288x4096");
    assert_eq!(class(plain), class(Product { n: 12000, ..plain }));
    let mut classes = BTreeSet::new();
    for kind in kinds() {
        for [m, n, k] in EXTENTS {
            assert!(
                classes.insert(class(Product { m, n, k, ..kind })),
                "{}",
                class(Product { m, n, k, ..kind })
            );
        }
    }
}

#[test]
fn grids_are_whole_clusters() {
    for kind in kinds() {
        for [m, n, k] in EXTENTS {
            for compute_units in [1, 3, 132] {
                let (problem, resources) = (Product { m, n, k, ..kind }, Resources { compute_units, ..H200 });
                for variant in problem.variants(&resources) {
                    let grid = problem.grid(&variant, &resources);
                    if variant.band == 0 {
                        // A block for each tile.
                        let [rows, columns, _] = variant.tile.map(u64::from);
                        let wanted = [
                            n.div_ceil(columns) * u64::from(variant.split),
                            m.div_ceil(rows),
                            problem.matrices,
                        ];
                        assert_eq!(grid.map(u64::from), wanted, "{}", variant.name());
                        continue;
                    }
                    let [blocks, 1, 1] = grid else { panic!("{}", variant.name()) };
                    assert!(blocks > 0 && blocks % variant.cluster == 0, "{}: {blocks}", variant.name());
                    assert!(blocks <= compute_units.max(variant.cluster), "{}: {blocks}", variant.name());
                }
            }
        }
    }
    let [blocks, ..] = Product::of(256, 256, 64).grid(&Gemm::SMALL, &H200);
    assert_eq!(blocks, 16);
    // No extents overflow anything.
    let huge = Product::of(u64::MAX, u64::MAX, u64::MAX);
    assert_eq!(huge.grid(&huge.variants(&H200)[0], &H200), [132, 1, 1]);
    assert!(huge.operations().is_finite());
}
