//! `compile` and `launch`.

use std::path::{Path, PathBuf};

use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::sim::{SimDrivers, SimFunction};
use vm_passthrough::{Host, PassthroughManager};

use super::host::{address, workstation};
use super::{Answer, vm_service};

/// A host, a folder for files, and the way to say a command line: `DIR` is the folder, `NAME.vir` one of the IR's own
/// kernels where the folder has no such file.
struct Bench {
    host: Host,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { host: workstation().plain_host(), dir: tempfile::tempdir().expect("a folder") }
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).expect("written");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, args: &str) -> Answer {
        let filetests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/run");
        let dir = self.dir.path().display().to_string();
        let words = args.split_whitespace().map(|word| match word.strip_suffix(".vir") {
            Some(_) if !self.path(word).exists() => filetests.join(word).display().to_string(),
            Some(_) => self.path(word).display().to_string(),
            None => word.replace("DIR", &dir),
        });
        vm_service(&self.host, &words.collect::<Vec<_>>().join(" "))
    }

    /// Checks the exit status, and what is printed and told: all of these parts.
    #[track_caller]
    fn check(&self, args: &str, exit: u8, out: &[&str], err: &[&str]) {
        let got = self.run(args);
        assert_eq!(got.exit, exit, "{args}: {}{}", got.out, got.err);
        for part in out {
            assert!(got.out.contains(part), "{args}: no `{part}` in\n{}", got.out);
        }
        for part in err {
            assert!(got.err.contains(part), "{args}: no `{part}` in\n{}", got.err);
        }
        assert_eq!(err.is_empty(), got.err.is_empty(), "{args}: {}", got.err);
    }
}

/// Two kernels: one that adds a number, one that loops for ever.
const TWO: &str = include_str!("../two.vir");

#[test]
fn compile_prints_code_writes_it_and_tells_what_it_needs() {
    let bench = Bench::new();
    bench.check("compile softmax.vir --target ptx:sm_90a", 0, &[".target sm_90a", ".entry vir_softmax"], &[]);
    bench.check("compile softmax.vir --target cpu -o DIR/softmax.o", 0, &["ELF, ", "@softmax  256×1×1"], &[]);
    assert!(std::fs::read(bench.path("softmax.o")).expect("the code").starts_with(b"\x7fELF"));
    bench.check("compile softmax.vir --target cpu --json", 2, &[], &["write it to a file with --output"]);
    bench.file("own.vir", TWO);
    std::os::unix::fs::symlink(bench.path("own.vir"), bench.path("link.ptx")).expect("a link");
    for output in ["own.vir", "DIR/link.ptx"] {
        let line = format!("compile own.vir --target ptx:sm_75 -o {output}");
        bench.check(
            &line,
            2,
            &[],
            &["is the file of the kernels, which would be lost; write to another one"],
        );
    }
    assert_eq!(std::fs::read_to_string(bench.path("own.vir")).expect("the file"), TWO);
    let out = bench.path("softmax.ptx");
    bench.check(
        &format!("compile softmax.vir --target ptx:sm_75 -o {}", out.display()),
        0,
        &[
            "ptx:sm_75: PTX, ",
            " bytes in ",
            "@softmax  256×1×1  64      -         @x: view<f32, [?, ?], read>, @y",
        ],
        &[],
    );
    assert!(std::fs::read_to_string(&out).expect("the code").contains(".target sm_75"));
    let json = |args: &str| -> serde_json::Value {
        let got = bench.run(args);
        assert_eq!((got.exit, got.err.as_str()), (0, ""), "{args}");
        serde_json::from_str(&got.out).expect("JSON")
    };
    let guest = json("compile topk.vir --target ptx:sm_80 --json");
    assert_eq!(guest["command"], "compile");
    assert_eq!(guest["kernels"][0]["parameters"][1]["type"], "view<f32, [?, ?], write>");
    assert_eq!(guest["kernels"][0]["parameters"][1]["offset"], 32);
    assert!(guest["code"].as_str().expect("text").contains(".entry vir_topk"));
    assert!(guest["kernels"][0]["stop_word_offset"].is_number());
    // What multiplies, and why not by `wgmma`.
    let product = include_str!("../../../vm-ir/filetests/tile/matmul_64.vir");
    bench.file("product.vir", product);
    bench.file(
        "unaligned.vir",
        &product.replace("@b: view<bf16, [?, ?], read, align 16>", "@b: view<bf16, [?, ?], read>"),
    );
    for (file, out) in [
        ("product.vir", &["  wgmma     @a: "][..]),
        (
            "unaligned.vir",
            &[
                "  mma.sync  @a: ",
                "@matmul_64 goes not by wgmma, line 18: @b promises",
                "  18 | kernel @matmul_64(",
            ],
        ),
    ] {
        bench.check(&format!("compile {file} --target ptx:sm_90a -o DIR/product.ptx"), 0, out, &[]);
    }
    let told = json("compile unaligned.vir --target ptx:sm_90a --json");
    let kernel = &told["kernels"][0];
    assert_eq!(
        (&kernel["products"][0], &kernel["fallback"][0]["line"]),
        (&"mma.sync".into(), &18.into()),
        "{kernel}"
    );
    assert_eq!(guest["kernels"][0]["products"], serde_json::json!([]));
    let trusted = json("compile topk.vir --target ptx:sm_80 --trusted --json");
    assert!(trusted["kernels"][0]["stop_word_offset"].is_null());
}

#[test]
fn compile_writes_into_no_fifo_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root makes another user's FIFO");
    }
    let bench = Bench::new();
    let fifo = bench.path("output");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o666.into(), 0).expect("a FIFO");
    std::os::unix::fs::chown(&fifo, Some(65534), Some(65534)).expect("another owner");
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let reader = rustix::fs::open(&fifo, flags, rustix::fs::Mode::empty()).expect("its owner reads");
    bench.check("compile softmax.vir --target ptx:sm_80 -o DIR/output", 0, &["@softmax"], &[]);
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "nothing was written into it");
    assert!(std::fs::read_to_string(&fifo).expect("a file in its place").contains(".visible .entry"));
}

#[test]
fn compile_assembles_where_the_name_asks_for_it() {
    let bench = Bench::new();
    bench.check("compile softmax.vir --target amdgcn:gfx942", 0, &["amdgpu_kernel void @vir_softmax("], &[]);
    for (target, name) in [("ptx:sm_90a", "k.hsaco"), ("cpu", "k.cubin"), ("amdgcn:gfx942", "k.cubin")] {
        let told = format!("and this one is {target}");
        bench.check(&format!("compile softmax.vir --target {target} -o DIR/{name}"), 2, &[], &[&told]);
        assert!(!bench.path(name).exists());
    }
    for (target, name, format, tool) in [
        ("amdgcn:gfx942", "k.hsaco", "code object", "llc"),
        ("amdgcn:gfx1100", "k.co", "code object", "llc"),
        ("ptx:sm_90a", "k.cubin", "cubin", "ptxas"),
    ] {
        let line = format!("compile softmax.vir --target {target} -o DIR/{name}");
        let got = bench.run(&line);
        if got.exit != 0 {
            assert!(got.err.contains(&format!("no {tool}")) && got.err.contains("install"), "{}", got.err);
            println!("skipped: {}", got.err);
            continue;
        }
        assert!(got.out.starts_with(&format!("{target}: {format}, ")), "{}", got.out);
        assert!(got.out.contains("@softmax  256×1×1"), "{}", got.out);
        assert!(std::fs::read(bench.path(name)).expect("the code").starts_with(b"\x7fELF"));
        let json: serde_json::Value =
            serde_json::from_str(&bench.run(&format!("{line} --json")).out).expect("JSON");
        assert_eq!((&json["format"], &json["code"]), (&format.into(), &serde_json::Value::Null));
    }
}

#[test]
fn compile_tells_what_a_target_has() {
    let bench = Bench::new();
    bench.check(
        "compile softmax.vir --target ptx:sm_70 --legal",
        0,
        &[
            "exp        f32",
            "expanded: range reduction",
            "warp.add   f32",
            "expanded: five shuffles",
            "sext       i32 to i64",
        ],
        &[],
    );
    bench.file(
        "ticks.vir",
        "vir 1\nkernel @ticks(@x: view<i64, [1], readwrite>) at 0x1000 block(1) {\n  %i = const 0 : i64\n  \
         %a = clock : i64\n  store @x[%i], %a\n}\n",
    );
    let told = "ticks.vir: kernel @ticks (guest 0x1000), line 4: cpu";
    bench.check(
        "compile ticks.vir --trusted --target cpu --legal",
        1,
        &["rejected: unsupported-op"],
        &[told],
    );
    bench.check(
        "compile ticks.vir --trusted --target cpu",
        1,
        &[],
        &[
            "ticks.vir: kernel @ticks",
            "has no `clock` of i64",
            "\n  4 |   %a = clock : i64\n    |        ^^^^^\n",
        ],
    );
    let got = bench.run("compile ticks.vir --trusted --target cpu --legal --json");
    let json: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(json["compiles"], false);
    assert_eq!(json["rejects"][0]["code"], "unsupported-op");
}

#[test]
fn what_is_wrong_with_a_file_is_told_with_its_line() {
    let bench = Bench::new();
    bench.file("text.vir", "vir 1\nkernel @k() at 0x1000 block(1) {\n  %a = frobnicate : f32\n}\n");
    bench.file(
        "rule.vir",
        "vir 1\nkernel @k() at 0x1000 block(1) {\n  %a = const 1 : i32\n  %b = sqrt %a : i32\n}\n",
    );
    bench.file("empty.vir", "vir 1\n");
    bench.file("two.vir", TWO);
    std::fs::write(bench.path("bytes.vir"), b"\0vir\xff\xff").expect("written");
    std::fs::write(bench.path("latin.vir"), b"vir 1 ; \xe4").expect("written");
    let check = |file: &str, exit: u8, err: &str| {
        bench.check(&format!("compile {file} --target ptx:sm_90a"), exit, &[], &[err]);
    };
    check(
        "text.vir",
        2,
        "text.vir: line 3:8, kernel @k: there is no op \"frobnicate\"\n  3 |   %a = frobnicate : f32\n    |        ^^^^^^^^^^\n",
    );
    check("rule.vir", 2, "rule.vir: kernel @k at 0x1000, line 4, sqrt: operand 1 is i32");
    check("rule.vir", 2, "bf16, f32 or f64\n  4 |   %b = sqrt %a : i32\n    |             ^^\n");
    bench.file(
        "sign.vir",
        "vir 1\nkernel @k(%n: i32) at 0x1000 block(1) {\n  %a = lt %n, 4 : bool\n  %b = rem.s %n, 4 : f32\n}\n",
    );
    check("sign.vir", 2, "write lt.s or lt.u\n  3 |   %a = lt %n, 4 : bool\n    |           ^^\nerror: ");
    check("bytes.vir", 2, "bytes.vir: ");
    check("latin.vir", 2, "byte 8 is not UTF-8");
    check("DIR/none.bin", 2, "none.bin can't be read: No such file");
    let launch = |args: &str, err: &str| {
        bench.check(&format!("launch {args} --device interpreter --grid 1"), 2, &[], &[err]);
    };
    launch("empty.vir", "empty.vir has no kernel");
    launch("two.vir", "two.vir has several kernels; choose one with --kernel: @shift, @spin");
    launch("two.vir --kernel shaft", "two.vir has no kernel @shaft; it has @shift, @spin");
}

#[test]
fn outputs_go_through_no_link_that_was_put_in_their_way() {
    let bench = Bench::new();
    bench.file("two.vir", TWO);
    bench.file("secret", "root's");
    let planted = [format!("x.npy.{}.tmp", std::process::id()), "x.npy".into()];
    for name in &planted {
        std::os::unix::fs::symlink(bench.path("secret"), bench.path(name)).expect("a link");
    }
    bench.check(
        "launch two.vir --kernel @shift --device interpreter --grid 2 --arg x=i32[40]=arange --arg by=7 --out x=@DIR/x.npy",
        0,
        &["x.npy"],
        &[],
    );
    assert_eq!(std::fs::read(bench.path("secret")).expect("a file"), b"root's");
    assert!(bench.path("x.npy").symlink_metadata().expect("the output").is_file());
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::symlink(bench.path("secret"), bench.path("code.o")).expect("a link");
        std::os::unix::fs::lchown(bench.path("code.o"), Some(12345), None).expect("another's");
        bench.check("compile two.vir --target cpu -o DIR/code.o", 0, &["ELF, "], &[]);
        assert_eq!(std::fs::read(bench.path("secret")).expect("a file"), b"root's");
        // Another user's link to a directory, on the way.
        std::os::unix::fs::symlink(bench.path("."), bench.path("results")).expect("a link");
        std::os::unix::fs::lchown(bench.path("results"), Some(12345), None).expect("another's");
        let says = ["results is a link that the user 12345 made"];
        bench.check("compile two.vir --target cpu -o DIR/results/secret", 1, &[], &says);
        let launch =
            "launch two.vir --kernel @shift --device interpreter --grid 2 --arg x=i32[40] --arg by=7";
        bench.check(&format!("{launch} --out x=@DIR/results/secret"), 1, &[], &says);
        assert_eq!(std::fs::read(bench.path("secret")).expect("a file"), b"root's");
    }
}

#[test]
fn launch_on_the_interpreter() {
    let bench = Bench::new();
    bench.file("two.vir", TWO);
    bench.check(
        "launch two.vir --kernel @shift --device interpreter --grid 2 --arg x=i32[40]=arange --arg by=7 --out x=@DIR/x.npy",
        0,
        &["@shift on interpreter: grid 2×1×1, block 32×1×1, ran ", "@x      i32[40]", "7 8 9 10 11 12 13 14 …"],
        &[],
    );
    // What one launch wrote is what the next one reads.
    bench.check(
        "launch two.vir --kernel shift --device interpreter --grid 2 --arg x=@DIR/x.npy --arg by=1",
        0,
        &["@x      i32[40]  -     -      8 9 10 11 12 13 14 15 …"],
        &[],
    );
    let got = bench.run(
        "launch softmax.vir --device interpreter --grid 2 --arg x=f32[2,4]=zeros --arg y=f32[2,4] --json",
    );
    let json: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!(
        json["outputs"][0]["first"],
        serde_json::json!([0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25])
    );
    assert_eq!(json["outputs"][0]["shape"], serde_json::json!([2, 4]));
    assert_eq!(json["block"], serde_json::json!([256, 1, 1]));
    let spin = "launch two.vir --kernel spin --device interpreter --grid 1 --arg x=i32[1] --deadline 0.2";
    bench.check(
        spin,
        1,
        &[],
        &["kernel @spin at 0x2000", "the deadline passed; the interpreter takes one step at a time"],
    );
}

/// A model of one product.
const MODEL: &str = r#"{"name": "mlp",
  "inputs": [{"name": "x", "ty": {"element": "f32", "extents": [1, 2]}}, {"name": "w", "ty": {"element": "f32", "extents": [2, 3]}}],
  "nodes": [{"op": "mat_mul", "operands": [0, 1]}, {"op": {"unary": "relu"}, "operands": [2]}],
  "outputs": [{"name": "y", "value": 3}]}"#;

#[test]
fn models() {
    let bench = Bench::new();
    bench.file("mlp.json", MODEL);
    let launch = "launch DIR/mlp.json --device interpreter --arg x=f32[1,2]=ones --arg w=f32[2,3]=arange";
    bench.check(&format!("{launch} --out y=@DIR/y.npy"), 0, &["@mlp on interpreter", "3.0 5.0 7.0"], &[]);
    bench.check(
        "compile DIR/mlp.json --target onnx -o DIR/mlp.onnx",
        0,
        &["onnx: opset 21, 2 operations", "f32[1, 3]  output"],
        &[],
    );
    assert!(std::fs::read(bench.path("mlp.onnx")).expect("a file").windows(6).any(|part| part == b"MatMul"));
    bench.file("two.vir", TWO);
    bench.file("wrong.json", &MODEL.replace("[0, 1]", "[0, 0]"));
    bench.file("broken.json", "{");
    let check = |line: &str, err: &str| bench.check(line, 2, &[], &[err]);
    check(&format!("{launch} --grid 2"), "--grid is for kernels");
    check(&format!("{launch} --check"), "this is the interpreter");
    check(
        "launch DIR/mlp.json --device interpreter --arg x=f32[1,2]",
        "there is no argument for w: f32[2, 3]; add --arg w=f32[2,3]",
    );
    check(
        "launch DIR/mlp.json --device interpreter --arg x=f32[2,2]",
        "argument x: f32[2, 2] is not f32[1, 2]",
    );
    check(
        "launch DIR/mlp.json --device interpreter --arg z=f32[2,2]",
        "model mlp has no input z; it has x: f32[1, 2], w: f32[2, 3]",
    );
    check(&format!("{launch} --out z=@DIR/z.npy"), "model mlp has no output z; it has y");
    check(
        "launch DIR/wrong.json --device interpreter",
        "operation 0 (mat_mul): there is no product of f32[1, 2] and f32[1, 2]",
    );
    check("launch DIR/broken.json --device interpreter", "broken.json: no model: ");
    check("launch two.vir --device npu:0 --grid 1", "an NPU runs models, not kernels of threads");
    check("launch two.vir --device interpreter", "a kernel needs a grid");
    check("compile two.vir --target onnx -o DIR/two.onnx", "these are kernels");
    check("compile DIR/mlp.json --target onnx --legal", "are for kernels");
}

/// A whole GPT of the kernel library, from its file to an ONNX model and onto the emulated Hexagon.
#[test]
fn a_gpt_is_a_model() {
    let bench = Bench::new();
    let config = gpt::config::Config {
        element: vm_ir::Scalar::F32,
        width: 64,
        heads: 4,
        batch: 1,
        ..gpt::config::Config::TINY
    };
    let parameters = gpt::parameters::Parameters::of(&config);
    let mut masters = parameters.initial(&config, 1);
    masters[..parameters.sizes[0] as usize].iter_mut().for_each(|x| *x *= 5.0);
    let graph = gpt::export::next_token(&config, config.tokens, gpt::export::Weights::Constants(&masters))
        .expect("a graph");
    std::fs::write(bench.path("gpt.vgr"), vm_graph::encode(&graph).expect("bytes")).expect("written");
    let operations = format!("onnx: opset 21, {} operations", graph.nodes.len());
    bench.check(
        "compile DIR/gpt.vgr --target onnx -o DIR/gpt.onnx",
        0,
        &[
            &operations,
            "tokens  i32[1, 20]  input",
            "logits  f32[1, 40]  output",
            "token   i32[1]      output",
        ],
        &[],
    );
    let launch =
        "launch DIR/gpt.vgr --arg tokens=i32[1,20]=arange --arg last=i32[1]=ones --out token=@DIR/token.npy";
    bench.check(&format!("{launch} --device interpreter"), 0, &["@gpt on interpreter"], &[]);
    let wanted = std::fs::read(bench.path("token.npy")).expect("a token");
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../features/accelerator/backends/npu/tests/fetch-onnxruntime");
    let fetched = std::process::Command::new(script).output().expect("it starts");
    if !cfg!(target_arch = "x86_64") || !fetched.status.success() {
        println!("skipped: no emulated Hexagon: {}", String::from_utf8_lossy(&fetched.stderr));
        return;
    }
    // The host has no NPU of its own.
    bench.check(
        &format!("{launch} --device npu:0 --check"),
        0,
        &["@gpt on Qualcomm Hexagon, emulated, by QNN", "@token   i32[1]", "agrees"],
        &[],
    );
    assert_eq!(std::fs::read(bench.path("token.npy")).expect("a token"), wanted);
}

#[test]
fn every_mismatch_of_an_argument_is_told() {
    let bench = Bench::new();
    bench.file("two.vir", TWO);
    let check = |args: &str, err: &str| {
        let line = format!("launch two.vir --kernel shift --device interpreter --grid 1 {args}");
        bench.check(&line, 2, &[], &[err]);
    };
    let good = "--arg x=i32[4] --arg by=1";
    bench.check(&format!("launch two.vir --kernel shift --device interpreter --grid 1 {good}"), 0, &[], &[]);
    check(
        "",
        "kernel @shift has no argument for @x: view<i32, [?], readwrite>; add --arg x=i32[EXTENT] or --arg x=@FILE.npy",
    );
    check("--arg x=i32[4]", "kernel @shift has no argument for %by: i32 in [0, 9]; add --arg by=NUMBER");
    check(
        &format!("{good} --arg z=1"),
        "no parameter z; it has @x: view<i32, [?], readwrite>, %by: i32 in [0, 9]",
    );
    check(&format!("{good} --arg by=2"), "argument by is given twice");
    check("--arg x=f32[4] --arg by=1", "argument x: is of f32, the view is of i32");
    check("--arg x=i32[2,2] --arg by=1", "argument x: extents [2, 2] do not fit view<i32, [?], readwrite>");
    check("--arg x=7 --arg by=1", "`7` is a number, and @x: view<i32, [?], readwrite> wants an array");
    check(
        "--arg x=i32[4] --arg by=i32[1]",
        "argument by: is an array, and %by: i32 in [0, 9] wants a number",
    );
    check("--arg x=i32[4] --arg by=1.5", "argument by: `1.5` is no i32");
    check("--arg x=i32[4] --arg by=10", "argument by: 10 is not from 0 to 9");
    check("--arg x=@DIR/none.npy --arg by=1", "none.npy can't be read: No such file");
    check(&format!("{good} --out z=@DIR/z.npy"), "kernel @shift has no parameter z");
    check(&format!("{good} --out by=@DIR/z.npy"), "by is a number, which a kernel does not change");
    check(&format!("{good} --out x=@DIR/z.npy --out x=@DIR/z.npy"), "z.npy is to be written twice");
    std::os::unix::fs::symlink(bench.path("two.vir"), bench.path("two.npy")).expect("a link");
    check(&format!("{good} --out x=@DIR/two.npy"), "two.npy is the file of the kernels, which would be lost");
    check(
        "--arg x=i32[1099511627776] --arg by=1",
        "argument x: 4398046511104 bytes are wanted, this machine has ",
    );
    check(&format!("{good} --fuel 5"), "the interpreter counts no fuel here");
    check(&format!("{good} --check"), "--check compares with the interpreter, and this is the interpreter");
    check(&format!("{good} --trusted --fuel 5"), "--fuel is for a guest's kernel");
    check(&format!("{good} --deadline 0"), "write seconds above 0");
    check(&format!("{good} --deadline -1"), "write seconds above 0");
    check(&format!("{good} --deadline nan"), "write seconds above 0");
    bench.file("x.npy", "no array");
    check("--arg x=@DIR/x.npy --arg by=1", "x.npy is no .npy file");
    let check = |args: &str, err: &str| bench.check(&format!("launch two.vir {args}"), 2, &[], &[err]);
    check("--kernel shift --device interpreter --grid 1,1,1,1", "4 sizes; a grid has x, y and z");
    check("--kernel shift --device interpreter --grid 0", "`0` is no number of blocks");
    check(
        "--kernel shift --device interpreter --grid -1",
        "`-1` is no number of blocks; write whole numbers from 1",
    );
    check("--kernel shift --device interpreter --grid 2,-1", "`-1` is no number of blocks");
    check("--kernel shift --device gpu --grid 1", "`gpu` is not a PCI address");
    check("--kernel shift --device rocm:one --grid 1", "`one` is no number of an AMD GPU, as in rocm:0");
    check(
        "--kernel shift --device interpreter --grid 1,65536 --arg x=i32[1] --arg by=1",
        "a grid of 1 × 65536 × 1 blocks",
    );
}

#[test]
fn a_kernel_file_is_a_regular_one() {
    let bench = Bench::new();
    let fifo = bench.path("fifo.vir");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .expect("a FIFO");
    std::fs::create_dir(bench.path("folder.vir")).expect("a folder");
    std::os::unix::fs::symlink("/dev/zero", bench.path("zero.vir")).expect("a link");
    for file in ["fifo.vir", "folder.vir", "zero.vir"] {
        let told = format!("{file} is no regular file; name a kernel file");
        bench.check(&format!("compile {file} --target cpu"), 2, &[], &[&told]);
        bench.check(&format!("launch {file} --device interpreter --grid 1"), 2, &[], &[&told]);
    }
}

#[test]
fn a_device_that_can_t_be_used_says_why() {
    let sim = workstation();
    sim.add_driver("vfio-pci").expect("a driver");
    let gpu = |address: &str, vendor: u16, group| {
        SimFunction::new(self::address(address), vendor, 0x74a1, 0x03_80_00).group(group)
    };
    sim.add(&gpu("0000:65:00.0", 0x1002, 65)).expect("a GPU");
    sim.add(&gpu("0000:66:00.0", 0x1002, 66)).expect("a GPU");
    sim.add(&SimFunction::new(address("0000:00:0b.0"), 0x8086, 0x7d1d, 0x12_00_00).group(67))
        .expect("an NPU");
    let node = "sys/class/kfd/kfd/topology/nodes/1";
    let write = |path: &str, text: &str| sim.write(path, text).expect("written");
    write(&format!("{node}/gpu_id"), "7\n");
    write(
        &format!("{node}/properties"),
        "simd_count 1216\nlds_size_in_kb 64\nwave_front_size 64\nsimd_per_cu 4\ngfx_target_version 90402\n\
         vendor_id 4098\ndevice_id 29857\nlocation_id 25856\ndomain 0\n",
    );
    let drivers = SimDrivers::new(&sim);
    let bench = Bench { host: drivers.host(), ..Bench::new() };
    let check = |device: &str, expect: &str| {
        let line = format!("launch silu.vir --device {device} --grid 1 --arg x=f32[4] --arg y=f32[4]");
        bench.check(&line, 1, &[], &[expect]);
    };
    check("0000:77:00.0", "there is no PCI function 0000:77:00.0 on this host; `vm-service list`");
    check("0000:02:00.0", "is no accelerator that runs kernels");
    // Without ROCm there is no library, with it none of its devices is at this address.
    for device in ["0000:65:00.0", "rocm:0"] {
        check(device, "libamdhip64");
    }
    check("rocm:1", "there is no rocm:1: the compute driver lists 1 of AMD's GPUs");
    check(
        "0000:66:00.0",
        "0000:66:00.0 is an AMD GPU that the compute driver does not list; bind it to amdgpu",
    );
    check("0000:00:0b.0", "an NPU runs models, not kernels of threads");
    // Without a GPU there is no library, with one there is none at this address.
    let silu = "launch silu.vir --device 0000:01:00.0 --grid 1 --arg x=f32[4] --arg y=f32[4]";
    let got = bench.run(silu);
    let told =
        got.err.contains("libcuda.so.1 can't be used") || got.err.contains("no accelerator at 0000:01:00.0");
    assert!(got.exit == 1 && told, "{}", got.err);
    let mut manager = PassthroughManager::with_host(drivers.host()).expect("a manager");
    manager.claim(address("0000:01:00.0"), &ClaimOptions::default()).expect("a claim");
    check("0000:01:00.0", "0000:01:00.0 is claimed already by process");
}

/// Kernels of the IR's own with arguments for them.
const LAUNCHES: &[&str] = &[
    "silu.vir --grid 4 --arg x=f32[1000]=random:1 --arg y=f32[1000]",
    "softmax.vir --grid 3 --arg x=f32[3,1000]=random:2 --arg y=f32[3,1000]",
    "softmax.vir --trusted --grid 5 --arg x=f32[5,300]=random:3 --arg y=f32[5,300]",
    "rmsnorm.vir --grid 2 --arg x=f32[2,1000]=random:4 --arg w=f32[1000]=random:5 --arg y=f32[2,1000] --arg epsilon=1e-6",
    "argmax.vir --grid 5 --arg x=f32[5,700]=random:6 --arg best=i32[5]",
    "cross_entropy.vir --grid 3 --arg logits=f32[3,500]=random:7 --arg targets=i32[3]=arange --arg losses=f32[3]",
    "matmul.vir --grid 3,2 --arg a=f32[20,37]=random:8 --arg b=f32[37,41]=random:9 --arg c=f32[20,41]",
    "topk.vir --grid 2 --arg x=f32[2,500]=random:10 --arg values=f32[2,8] --arg indices=i32[2,8]",
    "histogram.vir --grid 3 --arg x=i32[1500]=arange --arg counts=i32[64]",
    "scan.vir --grid 3 --arg x=i32[700]=random:11 --arg y=i32[700]",
    "philox.vir --grid 4 --arg out=i32[1000] --arg seed=7 --arg offset=3",
    "rope.vir --grid 3,2 --arg x=f32[3,2,64]=random:12 --arg positions=i32[3]=arange --arg y=f32[3,2,64] --arg base=10000",
    "warp.vir --kernel reduce --grid 1 --arg x=i32[64]=random:13 --arg out=i32[2,8]",
    "atomics.vir --kernel sum --grid 1 --arg x=f32[1]",
];

#[test]
fn the_cpu_agrees_with_the_interpreter() {
    let bench = Bench::new();
    for launch in LAUNCHES {
        bench.check(
            &format!("launch {launch} --device cpu --check"),
            0,
            &["compiled for cpu", "agrees"],
            &[],
        );
    }
    // What is compared differs where it should: a tolerance of nothing.
    let got = bench.run("launch softmax.vir --grid 1 --arg x=f32[1,999]=random:1 --arg y=f32[1,999] --device cpu --check --tolerance 0 --json");
    let json: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    let agrees = json["outputs"][0]["check"]["agrees"].as_bool().expect("an answer");
    assert_eq!(got.exit, if agrees { 0 } else { 1 }, "{}", got.err);
    assert_eq!(agrees, got.err.is_empty(), "{}", got.err);
}

/// A product whose parameters do not say that the inner extents are equal.
const PRODUCT: &str = "vir 1
kernel @product(@a: view<f32, [?, ?], read>, @b: view<f32, [?, ?], read>, @c: view<f32, [?, ?], write>) at 0x1000 block(32) {
  %i = global_id.x : i64
  %n = extent @c, 1 : i64
  %row = div.s %i, %n : i64
  %column = rem.s %i, %n : i64
  %m = extent @c, 0 : i64
  %inside = lt.s %row, %m : bool
  if %inside {
    %k = extent @a, 1 : i64
    %sum = for %j: i64 = 0 to %k step 1 carry(%s: f32 = 0) {
      %x = load @a[%row, %j] : f32
      %y = load @b[%j, %column] : f32
      %next = fma %x, %y, %s : f32
      yield %next
    }
    store @c[%row, %column], %sum
  }
}
";

#[test]
fn a_product_of_matrices_that_do_not_fit_is_refused() {
    let bench = Bench::new();
    // Where the parameters say that extents are equal, before anything runs.
    let extents = "--grid 1 --arg a=f32[4,5]=ones --arg b=f32[3,6]=ones --arg c=f32[4,6]";
    bench.check(
        &format!("launch matmul.vir --device cpu {extents}"),
        2,
        &[],
        &["the extents called k differ: @a has 5 in dimension 1, @b has 3 in dimension 0"],
    );
    // Else by what --check counts: 4 × 6 elements, each of which reads two rows that there are not.
    bench.file("product.vir", PRODUCT);
    let launch = format!("launch product.vir --device cpu --check {extents}");
    bench.check(
        &launch,
        1,
        &["agrees", "OUT OF BOUNDS  LINE  OP    EXTENTS  FIRST   ACCESSES", "@b             13    load  [3, 6]   [3, 0]  48"],
        &[
            "product.vir: line 13, load: @b, which has extents [3, 6], at [3, 0]: out of bounds 48 times",
            "\n  13 |       %y = load @b[%j, %column] : f32\n     |                 ^^\n",
            "give equal extents one name, as in view<f32, [m, k], read>, or allow it with --allow-out-of-bounds",
        ],
    );
    bench.check(&format!("{launch} --allow-out-of-bounds"), 0, &["agrees", "@b             13    load"], &[]);
    let json: serde_json::Value =
        serde_json::from_str(&bench.run(&format!("{launch} --json")).out).expect("JSON");
    assert_eq!(
        json["out_of_bounds"],
        serde_json::json!([{
            "op": "load", "line": 13, "place": "b", "extents": [3, 6], "first": [3, 0], "lanes": 1, "accesses": 48
        }])
    );
    let fitting = launch.replace("b=f32[3,6]", "b=f32[5,6]");
    bench.check(&fitting, 0, &["agrees"], &[]);
    let json: serde_json::Value =
        serde_json::from_str(&bench.run(&format!("{fitting} --json")).out).expect("JSON");
    assert_eq!(json["out_of_bounds"], serde_json::json!([]));
    let unchecked = bench.run(&format!("{fitting} --json").replace("--check", ""));
    let json: serde_json::Value = serde_json::from_str(&unchecked.out).expect("JSON");
    assert!(json["out_of_bounds"].is_null() && json["repeated"].is_null());
}

#[test]
fn a_race_on_one_element_suggests_an_atomic() {
    let bench = Bench::new();
    let sum = |add: &str| {
        format!("vir 1\nkernel @sum(@x: view<i32, [1], readwrite>) at 0x1000 block(64) {{\n{add}}}\n")
    };
    bench.file(
        "sum.vir",
        &sum("  %old = load @x[0] : i32\n  %new = add %old, 1 : i32\n  store @x[0], %new\n"),
    );
    bench.file("atomic.vir", &sum("  atomic.add.block @x[0], 1\n"));
    let launch = |file: &str| format!("launch {file} --device cpu --check --grid 1 --arg x=i32[1]");
    bench.check(
        &launch("sum.vir"),
        1,
        &[],
        &[
            "race on @x[0]",
            "or use an atomic, such as atomic.add.block, if both combine into the element",
            "\n  5 |   store @x[0], %new\n    |         ^^\n",
        ],
    );
    bench.check(&launch("atomic.vir"), 0, &["@x      i32[1]  -     agrees  64"], &[]);
}

#[test]
fn launches_that_are_repeated_are_timed() {
    let bench = Bench::new();
    bench.file("two.vir", TWO);
    for device in ["cpu", "interpreter"] {
        // Each begins with what was given: the sum is taken once, however often.
        let launch = format!(
            "launch two.vir --kernel @shift --device {device} --grid 2 --arg x=i32[40]=arange --arg by=7 --repeat 5"
        );
        bench.check(&launch, 0, &[" ms, the median of 5 launches of ", "7 8 9 10 11 12 13 14 …"], &[]);
        let json: serde_json::Value =
            serde_json::from_str(&bench.run(&format!("{launch} --json")).out).expect("JSON");
        let repeated = |key: &str| json["repeated"][key].as_f64().expect(key);
        assert_eq!(json["repeated"]["launches"], 5);
        assert!(repeated("min_ms") <= repeated("median_ms") && repeated("median_ms") <= repeated("max_ms"));
        assert_eq!(json["run_ms"], json["repeated"]["median_ms"]);
    }
    let line = "launch two.vir --kernel shift --device cpu --grid 1 --arg x=i32[4] --arg by=1 --repeat";
    bench.check(&format!("{line} 3 --check"), 0, &["agrees", "the median of 3 launches"], &[]);
    bench.check(&format!("{line} 0"), 2, &[], &["0 is not in 1..=1000000"]);
}

#[test]
fn targets_are_listed() {
    let bench = Bench::new();
    bench.check(
        "compile --list-targets",
        0,
        &["TARGET", "ptx:sm_70 ", "96 KiB", "ptx:sm_90a", "227 KiB", "cpu:aarch64", "(cpu)"],
        &[],
    );
    let got = bench.run("compile --list-targets --json");
    let json: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    let targets = json["targets"].as_array().expect("a list");
    for target in targets {
        let name = target["target"].as_str().expect("a name");
        bench.check(&format!("compile softmax.vir --target {name} --legal"), 0, &["exp"], &[]);
    }
    let hopper = targets.iter().find(|target| target["target"] == "ptx:sm_90a").expect("Hopper");
    assert_eq!(
        (&hopper["clusters"], &hopper["tiles"], &hopper["host"]),
        (&true.into(), &true.into(), &false.into())
    );
    assert_eq!(hopper["shared_bytes"], 227 << 10);
    bench.check("compile --list-targets --target cpu", 2, &[], &["cannot be used with"]);
    bench.check("compile softmax.vir", 2, &[], &["--target <TARGET>"]);
}

#[test]
fn softmax_on_the_cpu_reads_and_writes_files() {
    let bench = Bench::new();
    for (device, file) in [("cpu", "a.npy"), ("interpreter", "b.npy")] {
        bench.check(
            &format!(
                "launch softmax.vir --device {device} --grid 64 --arg x=f32[64,500]=random:4 --arg y=f32[64,500] \
                 --out x=@DIR/x.npy --out y=@DIR/{file}"
            ),
            0,
            &["@x", "@y", file],
            &[],
        );
    }
    let read = |file: &str| std::fs::read(bench.path(file)).expect("a file");
    let floats = |bytes: Vec<u8>| -> Vec<f32> {
        bytes[128..]
            .chunks_exact(4)
            .map(|word| f32::from_le_bytes(word.try_into().expect("a word")))
            .collect()
    };
    let (cpu, interpreter) = (floats(read("a.npy")), floats(read("b.npy")));
    assert_eq!((cpu.len(), interpreter.len()), (64 * 500, 64 * 500));
    assert!(cpu.iter().zip(&interpreter).all(|(a, b)| (a - b).abs() < 1e-6));
    assert!(cpu.chunks_exact(500).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5));
    // What went out comes in again.
    let again =
        "launch softmax.vir --device cpu --grid 64 --arg x=@DIR/x.npy --arg y=@DIR/b.npy --out y=@DIR/c.npy";
    bench.check(again, 0, &[], &[]);
    assert_eq!(read("a.npy"), read("c.npy"));
}

#[test]
fn the_cpu_stops_a_kernel_that_does_not_end() {
    let bench = Bench::new();
    bench.file("two.vir", TWO);
    let spin = |options: &str, expect: &str| {
        let line = format!("launch two.vir --kernel spin --device cpu --grid 1 --arg x=i32[1] {options}");
        bench.check(&line, 1, &[], &["spin was stopped: ", expect]);
    };
    spin("--deadline 0.3", "it took longer than 300ms");
    spin("--fuel 100000", "100000");
    // One without a loop, too.
    let fill = "vir 1\nkernel @fill(@x: view<i32, [?], write>) at 0x1000 block(256) {\n  %i = global_id.x : i64\n  \
                %v = const 1 : i32\n  store @x[%i], %v\n}\n";
    bench.file("fill.vir", fill);
    let grid = "launch fill.vir --device cpu --grid 2147483647,65535,65535 --arg x=i32[4] --deadline 0.3";
    bench.check(grid, 1, &[], &["fill was stopped: ", "it took longer than 300ms"]);
}

#[test]
fn tune_knows_attention() {
    let bench = Bench::new();
    bench.check("tune attention --heads 2 --tokens 64 --dim 80", 2, &[], &["write 64, 128, 192 or 256"]);
    let shared = "--heads 3 --key-heads 2 --tokens 64 --dim 64 --device cpu";
    bench.check(&format!("tune attention {shared}"), 2, &[], &["--heads 3 is no multiple of --key-heads 2"]);
    for (options, told) in [
        ("--element f64", "write one of bf16, f16, f32, f8e4m3"),
        ("--window x", "invalid digit"),
        ("--batch 1048577 --packed", "1048577 is not in 1..=1048576"),
        ("--output f16", "O holds what Q, K and V do, unless those hold f8e4m3; leave --output out"),
        ("--backward --element f8e4m3", "the gradients of attention are of bf16, f16 or f32"),
        ("--backward --log-sums", "cannot be used with"),
    ] {
        let line = format!("tune attention --heads 2 --tokens 64 --dim 64 --device cpu {options}");
        bench.check(&line, 2, &[], &[told]);
    }
    bench.check("tune decode --heads 2 --tokens 64 --dim 64 --page 24", 2, &[], &["a multiple of 16"]);
    bench.check("tune decode --heads 2 --tokens 64 --dim 64 --queries 17", 2, &[], &["17 is not in 1..=16"]);
    for (line, class, chosen) in [
        (
            "attention --heads 2 --tokens 60 --dim 64 --causal --element f32",
            "attention causal_f32_d64_2by1_64x64 on ",
            "chosen: attention_causal_f32_d64_",
        ),
        (
            "attention --heads 2 --key-heads 1 --batch 3 --tokens 60 --dim 64 --window 20 --causal --packed --log-sums",
            "attention window_24_1_bf16_d64_packed_lse_6by2_64x64 on ",
            "chosen: attention_window_bf16_d64_packed_lse_",
        ),
        (
            "attention --heads 2 --tokens 60 --dim 64 --causal --backward --element f16",
            "attention_gradients causal_f16_d64_2by1_64x64 on ",
            "chosen: attention_",
        ),
        (
            "decode --heads 4 --key-heads 2 --tokens 60 --dim 64 --page 16",
            "decode bf16_d64_p16_2x2x64 on ",
            "chosen: attention_decode_bf16_d64_paged_",
        ),
    ] {
        let line = format!("tune {line} --limit 20 --device cpu");
        // Where processors have tile kernels, a variant is chosen; where not, that is said.
        match bench.run(&line).exit {
            0 => bench.check(&line, 0, &[class, chosen], &[]),
            _ => bench.check(&line, 1, &[], &["could be measured on "]),
        };
    }
    // The kernels of the gradients, each with its launch.
    let got =
        bench.run("tune attention --heads 2 --tokens 60 --dim 64 --backward --limit 20 --device cpu --json");
    if got.exit == 0 {
        let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
        let launches = document["launches"].as_array().expect("launches");
        let names: Vec<_> = launches.iter().filter_map(|launch| launch["kernel"].as_str()).collect();
        let wanted = if names.len() == 3 { ["_prepare_", "_finish_"] } else { ["_delta_", "_dv_"] };
        assert!(names[0].contains(wanted[0]) && names[names.len() - 1].contains(wanted[1]), "{names:?}");
        assert!(launches.iter().any(|launch| launch["grid"] == document["grid"]), "{}", got.out);
    }
}

#[test]
fn tune_chooses_or_says_why_not() {
    let bench = Bench::new();
    bench.check("tune gemm --m 64 --n 64", 2, &[], &["--k <K>"]);
    bench.check("tune gemm --m 0 --n 64 --k 64", 2, &[], &["0 is not in 1.."]);
    bench.check("tune gemm --m 64 --n 64 --k 64 --element f64", 2, &[], &["write one of bf16, f16, tf32"]);
    for (options, told) in [
        ("--groups 2 --batch 2", "cannot be used with"),
        ("--scales columns", "write one of rows, blocks"),
        ("--activation tanh", "write one of relu, silu, gelu"),
        ("--aux store", "--activation"),
    ] {
        bench.check(&format!("tune gemm --m 64 --n 64 --k 64 {options}"), 2, &[], &[told]);
    }
    bench.check(
        "tune gemm --help",
        0,
        &["--groups <COUNT>", "--scales <rows|blocks>", "--alpha", "--bias", "--aux <store|gradient>"],
        &[],
    );
    bench.check("tune attention --help", 0, &["--window <COUNT>", "--packed", "--backward", "FP8"], &[]);
    // What is asked for is of the class that is tuned, or told to be missing.
    for (options, class) in [
        ("--groups 3", "nn_grouped_bf16_bf16_3x64x64x64"),
        ("--alpha --beta --bias --activation gelu --aux store", "nn_bf16_bf16_acb_gelu_aux_64x64x64"),
        ("--element f8e4m3 --b-transposed --scales blocks", "nt_f8e4m3_bf16_k_64x64x64"),
        ("--element f8e4m3 --b-transposed --scales rows --output f16", "nt_f8e4m3_f16_s_64x64x64"),
    ] {
        let got = bench.run(&format!("tune gemm --m 60 --n 64 --k 64 --limit 20 --device cpu {options}"));
        assert!(
            got.exit < 2 && (got.out.contains(class) || got.err.contains(class)),
            "{}{}",
            got.out,
            got.err
        );
    }
    bench.check("tune gemm --m 64 --n 64 --k 64 --device interpreter", 2, &[], &["its times say nothing"]);
    // Where processors have tile kernels, a variant is chosen; where not, that is said.
    let line = "tune gemm --m 60 --n 64 --k 64 --limit 20 --device cpu";
    let got = bench.run(&format!("{line} --json"));
    if got.exit == 0 {
        let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
        assert_eq!((&document["command"], &document["family"]), (&"tune".into(), &"gemm".into()));
        let variants = document["variants"].as_array().expect("variants");
        let chosen =
            variants.iter().find(|variant| variant["name"] == document["chosen"]).expect("the chosen");
        assert!(chosen["outcome"] == "measured" && chosen["median_us"].is_number(), "{}", got.out);
        bench.check(line, 0, &["gemm nn_bf16_bf16_64x64x64 on ", "MEDIAN", "chosen: gemm_nn_"], &[]);
    } else {
        let why = "no variant of family gemm, class nn_bf16_bf16_64x64x64, could be measured on ";
        bench.check(line, 1, &[], &[why, "gemm_nn_bf16_bf16_64x64x128_s4", "tile"]);
    }
}
