//! The legalisation table: it agrees with what is compiled, and rejections have a code and a place.

use vm_ir::op::{Opcode, TABLE};
use vm_ir::{Module, Scalar, Trust, text, validate};
use vm_jit::backend::ptx::{Arch, Options, Version};
use vm_jit::legal::{Support, cost, rejects, support, types_of};
use vm_jit::{Target, compile};

fn on(arch: &str, op: Opcode, from: Scalar, to: Scalar) -> String {
    support(&format!("ptx:{arch}").parse().unwrap(), op, from, to).to_string()
}

#[test]
fn answers() {
    use Opcode::*;
    use Scalar::*;
    let check = |arch, op, from, to, wanted: &str| {
        let found = on(arch, op, from, to);
        assert!(found.starts_with(wanted), "{arch} {op} {from} {to}: {found}");
    };
    check("sm_70", Add, F32, F32, "native");
    check("sm_70", Add, Bf16, Bf16, "expanded: in f32");
    check("sm_80", Add, Bf16, Bf16, "expanded: as one fused");
    check("sm_90a", Add, Bf16, Bf16, "native");
    check("sm_75", Min, F16, F16, "expanded");
    check("sm_80", Min, F16, F16, "native");
    check("sm_75", WarpAdd, I32, I32, "expanded: five shuffles");
    check("sm_80", WarpAdd, I32, I32, "native");
    check("sm_80", FpConv, F32, F8E4M3, "expanded: on the bits");
    check("sm_89", FpConv, F32, F8E4M3, "native");
    check("sm_120", Exp, F64, F64, "expanded: range reduction and a polynomial");
    check("sm_120", Sqrt, F64, F64, "native");
    check("sm_90", DivS, I32, I32, "expanded");
    let cpu = Target::Cpu(vm_jit::backend::cpu::Options::new(vm_jit::backend::cpu::Isa::X86V4));
    assert_eq!(support(&cpu, Add, F32, F32), Support::Native);
    assert!(matches!(support(&cpu, Exp, F64, F64), Support::Expanded(_)));
    assert!(matches!(support(&cpu, Clock, I64, I64), Support::Rejected("unsupported-op")));
}

/// A newer architecture has all that an older one has.
#[test]
fn newer_is_no_worse() {
    let rank = |s: Support| match s {
        Support::Native => 2,
        Support::Expanded(_) => 1,
        Support::Rejected(_) => 0,
    };
    let archs = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"];
    for row in TABLE {
        for (from, to) in types_of(row.opcode) {
            let ranks = archs.map(|a| {
                let target: Target = format!("ptx:{a}").parse().unwrap();
                rank(support(&target, row.opcode, from, to))
            });
            assert!(ranks.is_sorted(), "{} {from} {to}: {ranks:?}", row.mnemonic);
        }
    }
}

fn module(body: &str) -> Module {
    text::parse(&format!("vir 1\nkernel @k(@x: view<f64, [?], readwrite>) at 0x42 block(32) {{\n{body}}}\n"))
        .unwrap()
}

#[test]
fn rejections_have_places() {
    let module = module("  %i = global_id.x : i64\n  %a = load @x[%i] : f64\n  %b = clock : i64\n");
    let target: Target = "cpu".parse().unwrap();
    let found = rejects(&module, &target);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].line, found[0].guest.0, found[0].kind.code()), (5, 0x42, "unsupported-op"));
    let valid = validate(module, Trust::Trusted).unwrap();
    assert_eq!(compile(&valid, &target).unwrap_err().0, found);
}

/// Ops that are allowed, each of which becomes hundreds of instructions.
#[test]
fn code_that_becomes_too_long_is_rejected() {
    for (ops, wanted) in [(1, None), (500, Some("too-large"))] {
        let chain = (1..=ops).map(|n| format!("  %r{n} = pow %r{}, %r0 : vec16<f64>\n", n - 1));
        let ends = ("  %i = global_id.x : i64\n  %r0 = load @x[%i] : vec16<f64>\n", "  store @x[%i], %r");
        let body = format!("{}{}{}{ops}\n", ends.0, chain.collect::<String>(), ends.1);
        let valid = validate(module(&body), Trust::Guest).unwrap();
        let found = compile(&valid, &"ptx:sm_90a".parse().unwrap());
        let found = found.err().map(|rejected| rejected.0[0].to_string());
        assert_eq!(found.is_some(), wanted.is_some(), "{found:?}");
        let parts = [wanted.unwrap_or_default(), if ops > 1 { "instructions" } else { "" }];
        assert!(parts.iter().all(|part| found.as_deref().unwrap_or_default().contains(part)), "{found:?}");
    }
}

/// Clusters are for sm_90 and newer; a guest's must not be stopped one block at a time.
#[test]
fn clusters() {
    let kernel = |body: &str| {
        let head = "vir 1\nkernel @k(@x: view<i32, [?], read>, %n: i32) at 0x42 block(32) cluster(2) {\n";
        text::parse(&format!(
            "{head}  shared @s: i32[2]\n  %0 = const 0 : i32\n  %1 = const 1 : i32\n{body}}}\n"
        ))
        .unwrap()
    };
    let gather = "  cluster.gather @s, %n\n";
    let long = format!("  for %i: i32 = %0 to %n step %1 {{\n    %v = load @x[%i] : i32\n  }}\n{gather}");
    let check = |body: &str, target: &str, trust, wanted: Option<&str>| {
        let valid = validate(kernel(body), trust).unwrap();
        let found = compile(&valid, &target.parse().unwrap());
        let code = found.as_ref().err().map(|rejected| rejected.0[0].kind.code());
        assert_eq!(code, wanted, "{target} {trust:?}: {found:?}");
    };
    for arch in ["sm_70", "sm_80", "sm_89"] {
        check(gather, &format!("ptx:{arch}"), Trust::Trusted, Some("cluster"));
    }
    for arch in ["sm_90", "sm_90a", "sm_100", "sm_120"] {
        let target = format!("ptx:{arch}");
        check(gather, &target, Trust::Guest, None);
        check(&long, &target, Trust::Guest, Some("stopped-cluster"));
        check(&long, &target, Trust::Trusted, None);
    }
    for trust in [Trust::Guest, Trust::Trusted] {
        check(&long, "cpu", trust, None);
    }
    let mut old = Options::new("sm_90".parse().unwrap());
    old.max_version = Some(Version::new(8, 0));
    let valid = validate(kernel(gather), Trust::Trusted).unwrap();
    let found = compile(&valid, &Target::Ptx(old)).unwrap_err();
    assert_eq!(found.0[0].kind.code(), "cluster");
}

#[test]
fn an_old_driver() {
    let valid = validate(module(""), Trust::Guest).unwrap();
    for arch in Arch::all() {
        let mut options = Options::new(arch);
        options.max_version = Some(Version::of_driver(11_040));
        let found = compile(&valid, &Target::Ptx(options.clone()));
        match arch.first_version() <= Version::new(7, 4) {
            true => assert!(found.unwrap().text().unwrap().contains(".version 7.4")),
            false => assert_eq!(found.unwrap_err().0[0].kind.code(), "driver-too-old"),
        }
        // The oldest version that names it is enough.
        options.max_version = Some(arch.first_version());
        compile(&valid, &Target::Ptx(options)).unwrap();
    }
}

#[test]
fn target_names() {
    for arch in Arch::all() {
        let text = format!("ptx:{arch}");
        assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
    }
    assert!("sm_90".parse::<Target>().unwrap_err().to_string().contains("ptx:sm_90a"));
    let host: Target = "cpu".parse().unwrap();
    assert_eq!(host.to_string().parse::<Target>().unwrap(), host);
    assert!("cpu:z80".parse::<Target>().unwrap_err().to_string().contains("cpu:x86-64-v3"));
    assert!("ptx:sm_61".parse::<Target>().unwrap_err().to_string().contains("sm_70"));
}

/// The table in docs/jit.md: what is not native everywhere, ops that are alike together.
fn table() -> String {
    use std::fmt::Write;
    let archs = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];
    let mut rows: Vec<(Vec<&str>, String, Vec<Support>)> = Vec::new();
    for row in TABLE {
        let mut groups: Vec<(Vec<Support>, Vec<String>)> = Vec::new();
        for (from, to) in types_of(row.opcode) {
            let cells: Vec<Support> = archs
                .iter()
                .map(|a| support(&format!("ptx:{a}").parse().unwrap(), row.opcode, from, to))
                .collect();
            if cells.iter().all(|c| *c == Support::Native) {
                continue;
            }
            let ty = if from == to { from.to_string() } else { format!("{from} to {to}") };
            match groups.iter_mut().find(|(known, _)| *known == cells) {
                Some((_, types)) => types.push(ty),
                None => groups.push((cells, vec![ty])),
            }
        }
        for (cells, types) in groups {
            let types = types.join(", ");
            match rows.iter_mut().find(|(_, t, c)| *t == types && *c == cells) {
                Some((ops, ..)) => ops.push(row.mnemonic),
                None => rows.push((vec![row.mnemonic], types, cells)),
            }
        }
    }
    let mut out = String::from("| op | on | from | how |\n| --- | --- | --- | --- |\n");
    for (ops, types, cells) in rows {
        for (i, cell) in cells.iter().enumerate() {
            if i == 0 || *cell != cells[i - 1] {
                let ops: Vec<String> = ops.iter().map(|op| format!("`{op}`")).collect();
                let _ = writeln!(out, "| {} | {types} | {} | {cell} |", ops.join(" "), archs[i]);
            }
        }
    }
    out
}

/// The table of what a CPU does not have by an instruction.
fn cpu_table() -> String {
    use std::fmt::Write;
    let cpu = Target::Cpu(vm_jit::backend::cpu::Options::new(vm_jit::backend::cpu::Isa::X86V3));
    let mut rows: Vec<(Vec<&str>, String, Support)> = Vec::new();
    for row in TABLE {
        let mut groups: Vec<(Support, Vec<String>)> = Vec::new();
        for (from, to) in types_of(row.opcode) {
            let how = support(&cpu, row.opcode, from, to);
            if how == Support::Native {
                continue;
            }
            let ty = if from == to { from.to_string() } else { format!("{from} to {to}") };
            match groups.iter_mut().find(|(known, _)| *known == how) {
                Some((_, types)) => types.push(ty),
                None => groups.push((how, vec![ty])),
            }
        }
        for (how, types) in groups {
            let types = types.join(", ");
            match rows.iter_mut().find(|(_, t, h)| *t == types && *h == how) {
                Some((ops, ..)) => ops.push(row.mnemonic),
                None => rows.push((vec![row.mnemonic], types, how)),
            }
        }
    }
    let mut out = String::from("| op | on | how |\n| --- | --- | --- |\n");
    for (ops, types, how) in rows {
        let ops: Vec<String> = ops.iter().map(|op| format!("`{op}`")).collect();
        let _ = writeln!(out, "| {} | {types} | {how} |", ops.join(" "));
    }
    out
}

/// `VIR_UPDATE=1 cargo test -p vm-jit --test legal` writes the table again.
#[test]
fn the_document_has_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/jit.md");
    let mut text = std::fs::read_to_string(path).unwrap();
    for (name, table) in [("table", table()), ("cpu table", cpu_table())] {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let (head, rest) = text.split_once(&begin).unwrap();
        let (found, tail) = rest.split_once(&end).unwrap();
        let wanted = format!("\n{table}\n");
        if std::env::var_os("VIR_UPDATE").is_some() {
            text = format!("{head}{begin}{wanted}{end}{tail}");
            std::fs::write(path, &text).unwrap();
        } else {
            assert_eq!(found, wanted, "docs/jit.md is out of date");
        }
    }
}

/// Everything costs something, by what the target makes of it.
#[test]
fn costs() {
    let mut cases = 0;
    for name in ["cpu:x86-64-v3", "cpu:aarch64", "ptx:sm_70", "ptx:sm_90a", "ptx:sm_120"] {
        let target: Target = name.parse().unwrap();
        for row in TABLE {
            for (ty, to) in types_of(row.opcode) {
                for shared in [false, true] {
                    let cost = cost(&target, row.opcode, ty, to, shared);
                    assert!((1..=4096).contains(&cost), "{name} {} {ty} {to}: {cost}", row.mnemonic);
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 2000, "{cases}");
    let of = |target: &str, op, ty| cost(&target.parse().unwrap(), op, ty, ty, false);
    for op in [Opcode::Add, Opcode::Mul, Opcode::Fma, Opcode::Min] {
        let (cpu, half) = (of("cpu:x86-64-v3", op, Scalar::F32), of("cpu:x86-64-v3", op, Scalar::F16));
        assert!(half >= 8 * cpu, "{op} on a processor: f16 {half}, f32 {cpu}");
        assert_eq!(of("ptx:sm_90a", op, Scalar::F16), of("ptx:sm_90a", op, Scalar::F32), "{op}");
        assert!(of("ptx:sm_70", op, Scalar::Bf16) > of("ptx:sm_90a", op, Scalar::Bf16), "{op}");
    }
}

/// What a tile kernel's products go by is told, why not by `wgmma`, and what neither way takes, by which.
#[test]
fn the_way_of_products_is_told() {
    const PRODUCT: &str = include_str!("../../vm-ir/filetests/tile/matmul_64.vir");
    let check = |target: &str, edits: &[[&str; 2]], wanted: &[&str]| {
        let source = edits.iter().fold(PRODUCT.to_owned(), |source, [from, to]| source.replace(from, to));
        let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
        let target: Target = target.parse().unwrap();
        let found: Vec<String> =
            match compile(&validate(module, Trust::Guest).unwrap_or_else(|e| panic!("{e}")), &target) {
                Err(rejected) => rejected.0.iter().map(|r| format!("line {}: {}", r.line, r.kind)).collect(),
                Ok(artifact) => {
                    let products = artifact.entries[0].products.clone().unwrap_or_default();
                    let by = products.by.iter().map(ToString::to_string);
                    let why =
                        products.fallback.iter().map(|note| format!("line {}: {}", note.line, note.what));
                    // The code says it, too.
                    let code = artifact.text().unwrap_or_default();
                    assert_eq!(code.matches("// not by wgmma, line ").count(), products.fallback.len());
                    by.chain(why).collect()
                }
            };
        let agrees = found.len() == wanted.len()
            && found.iter().zip(wanted).all(|(found, wanted)| found.starts_with(wanted));
        assert!(agrees, "{target} {edits:?}: {found:#?}, not {wanted:#?}");
    };
    let unaligned = ["@b: view<bf16, [?, ?], read, align 16>", "@b: view<bf16, [?, ?], read, align 4>"];
    let why = "line 18: @b promises multiples of 4 bytes alone for its address and its rows', a tensor map takes those of 16; \
               write `align 16` if they are";
    check("ptx:sm_90a", &[], &["wgmma"]);
    check("ptx:sm_90a", &[unaligned], &["mma.sync", why]);
    // A target without `wgmma` owes no reason.
    for (target, by) in [("ptx:sm_80", "mma.sync"), ("ptx:sm_90", "mma.sync"), ("ptx:sm_75", "cores")] {
        check(target, &[unaligned], &[by]);
    }
    // Of shapes, those of stages, then of ops, then of fragments.
    let f32 = ["bf16[64, 64] stages 3", "f32[64, 64] stages 1"];
    let views = ["bf16, [?, ?], read, align 16", "f32, [?, ?], read, align 16"];
    check("ptx:sm_90a", &[f32, views], &["mma.sync", "line 48: f32 has no products"]);
    let narrow = ["[64, 64]", "[64, 48]"];
    let rows = ["channel @y: bf16[64, 48]", "channel @y: bf16[64, 48]"];
    let inner = ["channel @x: bf16[64, 48]", "channel @x: bf16[64, 64]"];
    check("ptx:sm_90a", &[narrow, rows, inner], &["wgmma"]);
    let short = [["[64, 64]", "[48, 64]"], ["channel @y: bf16[48, 64]", "channel @y: bf16[64, 64]"]];
    check(
        "ptx:sm_90a",
        &short,
        &["mma.sync", "line 48: @sum has 48 rows", "line 21: @sum has 48 rows", "line 22: @out has 48 rows"],
    );
    // What neither takes: the reasons of both where there are both.
    let one = [
        ["@x: bf16[64, 64]", "@x: bf16[1, 64]"],
        ["@sum: f32[64,", "@sum: f32[1,"],
        ["@out: bf16[64,", "@out: bf16[1,"],
    ];
    let wgmma = ["line 19: by wgmma: a stage of @x is 1 rows", "line 48: by wgmma: @sum has 1 rows"];
    let also = why.replace("line 18: ", "line 18: by wgmma: ");
    let mma = "@sum has one row; products";
    let named = format!("line 48: by mma.sync: {mma}");
    check("ptx:sm_90a", &one, &[&wgmma[..], &[&named]].concat());
    check("ptx:sm_90a", &[&one[..], &[unaligned]].concat(), &[&wgmma[..], &[&also, &named]].concat());
    check("ptx:sm_80", &one, &[&format!("line 48: {mma}")]);
}

#[test]
fn surfaces_are_where_images_are() {
    let source = std::fs::read_to_string("../vm-ir/filetests/surface/pixels.vir").unwrap();
    let module = text::parse(&source).unwrap();
    let valid = validate(module.clone(), Trust::Guest).unwrap();
    for arch in ["sm_75", "sm_90a"] {
        let code = compile(&valid, &format!("ptx:{arch}").parse().unwrap()).unwrap();
        let text = code.text().unwrap();
        for access in [
            "suld.b.2d.v4.b8.zero {",
            "sust.b.2d.v4.b8.zero [",
            "suld.b.2d.v2.b16.zero {",
            "suld.b.a2d.b32.zero {",
            "sust.b.a2d.b32.zero [",
        ] {
            assert!(text.contains(access), "{arch}: {access}");
        }
    }
    let target: Target = "amdgcn:gfx942".parse().unwrap();
    let found = rejects(&module, &target);
    assert_eq!(found.len(), 6, "{found:?}");
    assert!(found.iter().all(|one| one.kind.code() == "unsupported-surface"), "{found:?}");
    let first = found[0].to_string();
    assert!(first.contains("gfx942 has no surfaces, as @image is one"), "{first}");
}
