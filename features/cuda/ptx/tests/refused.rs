//! What is refused, by which words, with the line and the instruction.

use std::path::Path;
use vm_ptx::{Module, Options};

/// A kernel of these lines, the first of which is line 7.
fn kernel(body: &str, functions: &str) -> String {
    format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n\
         .visible .entry k(.param .u64 a, .param .u32 n) {{\n\
         .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .shared .align 4 .b8 s[64];\n\
         ld.param.u64 %rd1, [a]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; setp.ge.s32 %p1, %r2, %r1;\n\
         {body}\n st.global.v4.u32 [%rd1], {{%r1, %r2, %r3, %r4}}; st.global.u64 [%rd1], %rd2; st.global.f32 [%rd1], %f1; ret;\n\
         }}\n{functions}\n"
    )
}

fn translated(text: &str) -> Result<(), vm_ptx::Error> {
    let options = Options { block: [64, 1, 1], dynamic_shared: 0, data: 0 };
    Module::parse(text)?.translate("k", &options).map(|_| ())
}

#[track_caller]
fn check(body: &str, functions: &str, line: u32, instruction: &str, words: &str) {
    let error = translated(&kernel(body, functions)).unwrap_err();
    assert!(error.kind.to_string().contains(words), "{error}");
    assert_eq!((error.line, error.instruction.as_str()), (line, instruction), "{error}");
}

#[test]
fn instructions() {
    let bare = "cvt.rn.satfinite.e4m3x2.f32 %r2;";
    check(bare, "", 7, bare, "a conversion of such types is not supported");
    check("mov.u64 %rd2, %clock64;", "", 7, "mov.u64 %rd2, %clock64;", "%clock64 is not supported");
    check(
        "tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%rd1, {%f1,%f2}];",
        "",
        7,
        "tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%rd1, {%f1,%f2}];",
        "tex is not supported",
    );
    check(
        "add.rz.f16 %r1, %r1, %r1;",
        "",
        7,
        "add.rz.f16 %r1, %r1, %r1;",
        "a rounding other than .rn is not supported",
    );
    check("add.s32.foo %r1, %r1, %r1;", "", 7, "add.s32.foo %r1, %r1, %r1;", ".foo of add is not supported");
    check(
        "bar.sync 1, 32;",
        "",
        7,
        "bar.sync 1, 32;",
        "a barrier of other than all threads is not supported",
    );
    check(
        "ld.global.f32 %f1, [nowhere];",
        "",
        7,
        "ld.global.f32 %f1, [nowhere];",
        "nothing is called nowhere",
    );
    for line in ["dp4a.hi.s32.s32 %r1, %r1, %r1, %r1;", "popc.wrap.b32 %r1, %r1;"] {
        check(line, "", 7, line, " is not supported");
    }
    check("bra away;", "", 7, "bra away;", "nothing is called away");
}

#[test]
fn calls() {
    let print = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);";
    let call = "{ .param .b64 p0; .param .b64 p1; .param .b32 r0; call.uni (r0), vprintf, (p0, p1); }";
    check(
        call,
        print,
        7,
        "call.uni (r0), vprintf, (p0, p1);",
        "printf of a format that is known to none but the launch is not supported",
    );
    let own = ".func f(.param .b32 x) { .param .b32 p; call.uni f, (p); ret; }";
    check("{ .param .b32 p0; call.uni f, (p0); }", own, 10, "call.uni f, (p);", "f calls itself");
    check(
        "call (%r1), %rd1, (%r2), proto;",
        "",
        7,
        "call (%r1), %rd1, (%r2), proto;",
        "a call through a pointer",
    );
}

/// The instructions of the PTX ISA 9.1, section 9.7, by their first word, in the order of its subsections.
const INSTRUCTIONS: &str = "add sub mul mad mul24 mad24 sad div rem abs neg min max popc clz bfind fns brev bfe bfi bmsk szext dp4a dp2a \
    addc subc madc testp copysign fma rcp sqrt rsqrt sin cos lg2 ex2 tanh set setp selp slct and or xor not cnot lop3 shf shl shr \
    mov shfl prmt ld ldu st multimem prefetch prefetchu applypriority discard createpolicy isspacep cvta cvt mapa getctarank \
    cp tensormap tex tld4 txq istypep suld sust sured suq bra brx call ret exit bar barrier membar fence atom red vote match \
    activemask redux griddepcontrol elect mbarrier clusterlaunchcontrol wmma mma ldmatrix stmatrix movmatrix wgmma tcgen05 \
    stacksave stackrestore alloca vadd vsub vabsdiff vmin vmax vshl vshr vmad vset vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 \
    vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4 brkpt nanosleep pmevent trap setmaxnreg";

/// What each kernel may have, and no row of the table.
const CONTROL: [&str; 5] = ["bra", "brx", "call", "ret", "exit"];

#[test]
fn each_instruction_of_the_isa_is_supported_and_tested_or_refused_by_name() {
    let supported: Vec<_> = vm_ptx::supported().flat_map(|(codes, _)| codes.iter().copied()).collect();
    let isa: Vec<_> = INSTRUCTIONS.split_whitespace().collect();
    for code in &supported {
        assert!(isa.contains(code), "{code} is no instruction of the ISA");
    }
    let mut tests = String::new();
    for folder in ["tests", "tests/kernels"] {
        for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
            let path = file.unwrap().path();
            if path.is_file() && !path.ends_with("refused.rs") {
                tests += &String::from_utf8_lossy(&std::fs::read(path).unwrap());
            }
        }
    }
    for code in isa {
        if CONTROL.contains(&code) || supported.contains(&code) {
            let is_tested = [".", " ", ";"].iter().any(|end| tests.contains(&format!("{code}{end}")));
            assert!(is_tested, "no test has {code}");
            continue;
        }
        let line = format!("{code}.foo.b32 %r1, %r2;");
        check(&line, "", 7, &line, &format!("{code} is not supported"));
    }
}

#[test]
fn control_flow() {
    // A loop that is entered in its middle.
    let text = kernel(
        "@%p1 bra inside;\nhead: add.s32 %r2, %r2, 1;\ninside: setp.lt.s32 %p2, %r2, 9;\n@%p2 bra head;",
        "",
    );
    let error = translated(&text).unwrap_err();
    assert!(error.to_string().contains("the control flow is irreducible"), "{error}");
    // A shuffle that whole warps pass by.
    let by_warp = "setp.ge.s32 %p1, %r2, 32;\n@%p1 bra out;\nshfl.sync.idx.b32 %r3, %r2, 0, 31, -1;\nout:";
    translated(&kernel(by_warp, "")).unwrap();
}

#[test]
fn modules() {
    let refused = |text: &str, words: &str| {
        let error = Module::parse(text).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused("", "begins with no .version");
    refused(".version 8.0\n.address_size 32", "line 2: an address size other than 64");
    refused(".version 8.0\n.global .texref t;", "line 2: .texref is not supported");
    refused(".version 8.0\n.entry k() { add.s32 %r1; ", "line 2");
    refused(".version 8.0\n.global .b8 x[99999999999999];", "more than 4294967296 bytes of variables");
    refused(".version 8.0\n.global .align 8 .u64 x[1] = { generic(y) };", "the address of y");
}

#[test]
fn an_unsupported_function_does_not_refuse_its_module() {
    let deep = format!("{} {}", "{".repeat(1000), "}".repeat(1000));
    let many = "add.s32 %r1, %r1, %r1; ".repeat(10) + "add" + &".x".repeat(200) + " %r1;";
    for (head, body, words) in [
        ("", deep.as_str(), "line 1: the module has more than 64 blocks in blocks"),
        ("", &many, "line 1: the module has more than 256 letters in an instruction's code"),
        ("", ".branchtargets 3;", "line 1: .branchtargets is not supported"),
        ("", ".reg .v2 .b32 %v;", "line 1: a register of several lanes is not supported"),
        (".explicitcluster .reqnctapercluster 2, 1, 1", "", "line 1: .explicitcluster is not supported"),
    ] {
        let text =
            format!(".version 8.0 .entry k() {head} {{ .reg .b32 %r<2>; {body} }} .entry fine() {{ ret; }}");
        let module = Module::parse(&text).unwrap();
        assert_eq!(module.kernels().collect::<Vec<_>>(), ["k", "fine"]);
        let options = Options { block: [64, 1, 1], dynamic_shared: 0, data: 0 };
        assert_eq!(module.translate("k", &options).unwrap_err().to_string(), words);
        module.translate("fine", &options).unwrap();
    }
}
