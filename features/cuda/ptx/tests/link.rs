//! Links of several modules: which definition each name means, and the errors, in nvlink's words.

mod common;

use common::{Program, Random, text};
use vm_ptx::{Input, Module, Options, link};

const HEAD: &str = ".version 8.0\n.target sm_75\n.address_size 64\n";

/// A kernel that stores what functions without parameters return.
fn kernel(name: &str, functions: &[&str]) -> String {
    let mut body = format!(
        ".visible .entry {name}(.param .u64 out) {{\n.reg .b32 %r<2>; .reg .b64 %x<2>;\nld.param.u64 %x1, [out];\n"
    );
    for (at, function) in functions.iter().enumerate() {
        body += &format!(
            "{{ .param .b32 got; call.uni (got), {function}; ld.param.b32 %r1, [got]; }}\nst.global.u32 [%x1+{}], %r1;\n",
            4 * at
        );
    }
    body + "ret;\n}\n"
}

/// A function that returns the word in a variable, or a constant.
fn returns(linkage: &str, name: &str, what: &str) -> String {
    let load = match what.parse::<u32>() {
        Ok(number) => format!("mov.u32 %r1, {number};"),
        Err(_) => format!("ld.u32 %r1, [{what}];"),
    };
    format!(
        "{linkage} .func (.param .b32 r) {name}() {{\n.reg .b32 %r<2>;\n{load}\nst.param.b32 [r], %r1; ret;\n}}\n"
    )
}

fn external(name: &str) -> String {
    format!(".extern .func (.param .b32 r) {name}();\n")
}

fn try_link(modules: &[&str]) -> Result<String, String> {
    let texts: Vec<_> = modules.iter().map(|module| format!("{HEAD}{module}")).collect();
    let names = ["a", "b", "c", "d"];
    let inputs: Vec<_> =
        texts.iter().zip(names).map(|(text, name)| Input { name, text, optional: false }).collect();
    link(&inputs, None).map_err(|error| error.to_string())
}

/// Links modules and runs `k`: the words that it stored.
fn run(modules: &[&str], count: usize) -> Vec<u32> {
    let text = try_link(modules).unwrap_or_else(|error| panic!("{error}"));
    let mut program = Program::of(&text);
    let out = program.put(&vec![0u32; count]);
    program.launch("k", [1, 1, 1], [1, 1, 1], &[out.into()]);
    program.get(out, count)
}

#[test]
fn references_are_resolved_in_any_order() {
    let main = external("f") + &external("g") + &kernel("k", &["f", "g"]);
    let f = external("g")
        + ".extern .global .align 4 .u32 shared_word;\n"
        + &returns(".visible", "f", "shared_word");
    let g = ".visible .global .align 4 .u32 shared_word = 7;\n".to_owned() + &returns(".visible", "g", "9");
    assert_eq!(run(&[&main, &f, &g], 2), [7, 9]);
    assert_eq!(run(&[&g, &f, &main], 2), [7, 9]);
}

#[test]
fn names_without_linkage_are_of_their_module() {
    let module = |value: u32, visible: &str| {
        format!(
            ".global .align 4 .u32 word = {value};\n.global .align 8 .u64 to = generic(word);\n.shared .align 4 .b32 scratch;\n"
        ) + &returns("", "local", "word")
            + &format!(
                ".visible .func (.param .b32 r) {visible}() {{\n.reg .b32 %r<3>; .reg .b64 %x<2>;\n\
                 {{ .param .b32 got; call.uni (got), local; ld.param.b32 %r1, [got]; }}\n\
                 ld.global.u64 %x1, [to]; ld.u32 %r2, [%x1]; mad.lo.u32 %r1, %r1, 100, %r2;\n\
                 st.shared.u32 [scratch], %r1; ld.shared.u32 %r2, [scratch]; st.param.b32 [r], %r2; ret;\n}}\n"
            )
    };
    // The third has a function of the others' name that all modules see.
    let main = external("f")
        + &external("g")
        + &returns(".visible", "local", "3")
        + &kernel("k", &["f", "g", "local"]);
    let modules = [module(1, "f"), module(2, "g"), main];
    assert_eq!(run(&modules.each_ref().map(String::as_str), 3), [101, 202, 3]);
}

#[test]
fn a_renamed_name_is_no_other_of_the_function() {
    // A register, a label, a parameter and a local variable called as the variable that is renamed, and names that could be new ones.
    let other = ".global .align 4 .u32 word = 5;\n.global .align 4 .u32 word$_1 = 6;\n.global .align 4 .u32 word$__1 = 6;\n".to_owned()
        + &returns(".visible", "g", "word");
    let main = ".global .align 4 .u32 word = 8;\n".to_owned()
        + &external("g")
        + ".func (.param .b32 r) inner(.param .b32 word) {\n.reg .b32 %r<2>;\nld.param.b32 %r1, [word]; st.param.b32 [r], %r1; ret;\n}\n\
           .func (.param .b32 r) register() {\n.reg .b32 word;\nmov.u32 word, 3; bra word_;\nword_: st.param.b32 [r], word; ret;\n}\n\
           .func (.param .b32 r) label() {\n.reg .b32 %r<2>;\nbra word;\nword: ld.global.u32 %r1, [word]; st.param.b32 [r], %r1; ret;\n}\n\
           .func (.param .b32 r) passed() {\n.reg .b32 %r<2>;\n{ .param .b32 a; st.param.b32 [a], 4; .param .b32 got; call.uni (got), inner, (a); ld.param.b32 %r1, [got]; }\nst.param.b32 [r], %r1; ret;\n}\n"
        + &kernel("k", &["g", "register", "label", "passed"]);
    assert_eq!(run(&[&other, &main], 4), [5, 3, 8, 4]);
}

#[test]
fn of_weak_definitions_the_first_stays_and_a_strong_one_wins() {
    let main = external("f") + &kernel("k", &["f"]);
    let weak = [1, 2].map(|value| returns(".weak", "f", &value.to_string()));
    let strong = returns(".visible", "f", "3");
    assert_eq!(run(&[&main, &weak[0], &weak[1]], 1), [1]);
    assert_eq!(run(&[&main, &weak[1], &weak[0]], 1), [2]);
    assert_eq!(run(&[&weak[0], &main, &strong], 1), [3]);
    assert_eq!(run(&[&strong, &main, &weak[0]], 1), [3]);
    // Of common variables the largest stays.
    let common = |size: u32| format!(".common .global .align 4 .b8 room[{size}];\n");
    let modules = [common(4), common(16) + &kernel("k", &[]), common(8)];
    let linked = try_link(&modules.each_ref().map(String::as_str)).unwrap();
    assert_eq!(Module::parse(&linked).unwrap().data().size, 16);
}

#[test]
fn an_alias_is_its_function() {
    let main = external("f") + &kernel("k", &["f"]);
    let alias =
        ".visible .func (.param .b32 r) f();\n".to_owned() + &returns("", "g", "6") + ".alias f, g;\n";
    assert_eq!(run(&[&returns("", "g", "5"), &main, &alias], 1), [6]);
}

#[test]
fn what_is_undefined_or_defined_twice_is_an_error_that_names_it() {
    let main = external("f") + &external("unused") + ".extern .global .u32 v;\n" + &kernel("k", &["f"]);
    let f = returns(".visible", "f", "1");
    let undefined = |name: &str, module: &str| Err(format!("Undefined reference to '{name}' in '{module}'"));
    assert_eq!(try_link(&[&main]), undefined("f", "a"));
    let uses = ".extern .global .u32 v;\n".to_owned() + &returns(".visible", "f", "v");
    assert_eq!(try_link(&[&main, &uses]), undefined("v", "b"));
    // A name that is local to another module does not count.
    assert_eq!(try_link(&[&main, &returns("", "f", "1")]), undefined("f", "a"));
    let two = external("f") + &external("g") + &kernel("k", &["g", "f", "g"]);
    assert_eq!(
        try_link(&[&two]).unwrap_err(),
        "Undefined reference to 'f' in 'a'\nUndefined reference to 'g' in 'a'"
    );
    let twice = |name: &str| Err(format!("Multiple definition of '{name}' in 'b', first defined in 'a'"));
    assert_eq!(try_link(&[&f, &f]), twice("f"));
    let k = kernel("k", &[]);
    assert_eq!(try_link(&[&k, &k]), twice("k"));
    let v = ".visible .global .u32 v;\n";
    assert_eq!(try_link(&[v, v]), twice("v"));
    // Declared otherwise than defined.
    let wide = ".visible .global .u64 v;\n";
    let wrong = "doesn't match for";
    assert_eq!(
        try_link(&[wide, &uses]).unwrap_err(),
        format!("Size {wrong} 'v' in 'b', first specified in 'a'")
    );
    let other = ".extern .func f(.param .b64 x);\n".to_owned() + &kernel("k", &[]);
    assert_eq!(
        try_link(&[&f, &other]).unwrap_err(),
        format!("Prototype {wrong} 'f' in 'b', first specified in 'a'")
    );
    // A name that its module does not declare is none of another's.
    let error = try_link(&[&kernel("k", &["f"]), &f]).unwrap_err();
    assert_eq!(error, "nothing is called f in 'a'");
}

#[test]
fn modules_may_disagree_whether_a_function_returns_something() {
    let none =
        ".visible .global .align 4 .u32 seen;\n.visible .func f() {\nst.global.u32 [seen], 7; ret;\n}\n";
    let main = external("f")
        + ".extern .global .align 4 .u32 seen;\n"
        + &returns("", "get", "seen")
        + &kernel("k", &["f", "get"]);
    assert_eq!(run(&[&main, none], 2)[1], 7);
    // The other way round.
    let main = ".extern .func f();\n".to_owned()
        + ".visible .entry k(.param .u64 out) {\n.reg .b64 %x<2>;\ncall.uni f; ld.param.u64 %x1, [out]; st.global.u32 [%x1], 5; ret;\n}\n";
    assert_eq!(run(&[&main, &returns(".visible", "f", "1")], 1), [5]);
    let wide = ".visible .func (.param .b64 r) f() {\nst.param.b64 [r], 1; ret;\n}\n";
    let error = try_link(&[&(external("f") + &kernel("k", &["f"])), wide]).unwrap_err();
    assert_eq!(error, "Prototype doesn't match for 'f' in 'a', first specified in 'b'");
}

#[test]
fn what_the_driver_defines_stays_external() {
    let print = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n\
        .global .align 1 .b8 text[3] = {104, 105, 0};\n";
    let call = |name: &str| {
        format!(
            "{print}.visible .entry {name}() {{\n.reg .b64 %x<3>;\nmov.u64 %x1, text; cvta.global.u64 %x2, %x1;\n\
             {{ .param .b64 a; st.param.b64 [a], %x2; .param .b64 b; st.param.b64 [b], 0; .param .b32 got; \
             call.uni (got), vprintf, (a, b); }}\nret;\n}}\n"
        )
    };
    let linked =
        try_link(&[&call("j"), &call("k"), ".extern .func (.param .b64 r) malloc(.param .b64 a);\n"])
            .unwrap();
    assert_eq!(linked.matches("vprintf(").count(), 1);
    let mut program = Program::of(&linked);
    for kernel in ["j", "k"] {
        program.launch(kernel, [1, 1, 1], [1, 1, 1], &[]);
        assert_eq!(program.printed.len(), 1, "{kernel}");
    }
}

#[test]
fn functions_in_variables_have_addresses_of_their_own() {
    let module = |name: &str| {
        let table = format!(".visible .global .align 8 .u64 {name}[2] = {{local, shared}};\n");
        external("shared") + &returns("", "local", "1") + &table
    };
    let main = returns(".visible", "shared", "2")
        + ".extern .global .align 8 .b64 x[2];\n.extern .global .align 8 .b64 y[2];\n\
           .visible .entry k(.param .u64 out) {\n.reg .b64 %d<6>;\nld.param.u64 %d1, [out];\n\
           ld.global.u64 %d2, [x]; ld.global.u64 %d3, [x+8]; ld.global.u64 %d4, [y]; ld.global.u64 %d5, [y+8];\n\
           st.global.u64 [%d1], %d2; st.global.u64 [%d1+8], %d3; st.global.u64 [%d1+16], %d4; st.global.u64 [%d1+24], %d5; ret;\n}\n";
    let words = run(&[&module("x"), &main, &module("y")], 8);
    let [x, x_shared, y, y_shared] = [0, 2, 4, 6].map(|at| &words[at..at + 2]);
    assert!(x_shared == y_shared && x != y && x != x_shared && y != y_shared, "{words:x?}");
    assert!(!words.chunks(2).any(|address| address == [0, 0]), "{words:x?}");
}

#[test]
fn a_module_of_a_library_is_linked_if_it_is_needed() {
    let texts = [
        external("f") + &kernel("k", &["f"]),
        returns(".visible", "h", "2"),
        external("g") + &returns(".visible", "f", "1"),
        // Would be defined twice.
        kernel("k", &[]),
    ]
    .map(|text| format!("{HEAD}{text}"));
    let inputs = texts.each_ref().map(|text| Input { name: "x", text, optional: text != &texts[0] });
    let linked = link(&inputs, None).unwrap();
    assert!(linked.contains("f()") && !linked.contains("h()"), "{linked}");
}

#[test]
fn the_newest_version_and_architecture_count_and_registers_have_a_limit() {
    let texts = [
        format!("{HEAD}{}", returns(".visible", "f", "1") + &kernel("k", &["f"])),
        ".version 7.8 .target sm_100a, debug .address_size 64\n.file 1 \"x.cu\"\n.section .debug_str { .b8 1 }\n".to_owned(),
    ];
    let inputs = texts.each_ref().map(|text| Input { name: "x", text, optional: false });
    let module = Module::parse(&link(&inputs, Some(1)).unwrap()).unwrap();
    assert_eq!((module.version(), module.target(), module.registers("k").unwrap()), ((8, 0), "sm_100a", 1));
    let module = Module::parse(&link(&inputs, None).unwrap()).unwrap();
    // An address of 64 bits and a number of 32.
    assert_eq!(module.registers("k").unwrap(), 3);
}

/// Splits a text into its functions and variables.
fn parts(text: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut open = false;
    for line in text.lines().filter(|line| !line.starts_with("//")) {
        let starts =
            [".visible", ".func", ".global", ".const", ".extern"].iter().any(|word| line.starts_with(word));
        open |= starts;
        if starts {
            parts.push(String::new());
        }
        if open {
            let part = parts.last_mut().unwrap();
            *part += line;
            part.push('\n');
        }
        open &= line != "}";
    }
    parts
}

#[test]
fn a_module_that_was_split_is_the_same_program() {
    for name in ["basics-debug", "shared-debug"] {
        let text = text(name);
        let whole = Module::parse(&text).unwrap();
        // Functions and variables of one module become those of all.
        let all = parts(&text).into_iter().map(|part| match part.split_whitespace().next() {
            Some(".func" | ".global" | ".const") => format!(".visible {part}"),
            _ => part,
        });
        let (dynamic, all): (Vec<_>, Vec<_>) = all.partition(|part| part.starts_with(".extern"));
        let (defined, _): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|part| part.contains('}') || !part.contains(".func"));
        let declared: Vec<String> = defined
            .iter()
            .filter(|part| !part.contains(".entry"))
            .map(|part| {
                let head = part.split(['{', '=', ';']).next().unwrap().trim();
                format!("{};\n", head.replacen(".visible", ".extern", 1))
            })
            .collect();
        let mut random = Random::new(48);
        for _ in 0..4 {
            let count = 2 + random.below(4) as usize;
            let mut modules = vec![HEAD.to_owned() + &declared.concat() + &dynamic.concat(); count];
            for part in &defined {
                modules[random.below(count as u64) as usize] += part;
            }
            let inputs: Vec<_> =
                modules.iter().map(|text| Input { name: "part", text, optional: false }).collect();
            let linked = link(&inputs, None).unwrap_or_else(|error| panic!("{name}: {error}"));
            let linked = Module::parse(&linked).unwrap();
            let mut kernels: Vec<_> = whole.kernels().collect();
            kernels.sort_unstable();
            let mut found: Vec<_> = linked.kernels().collect();
            found.sort_unstable();
            assert_eq!(found, kernels, "{name}");
            let options = Options { block: [64, 1, 1], dynamic_shared: 1024, data: 0 };
            for kernel in kernels {
                let translate = |module: &Module| module.translate(kernel, &options);
                let [whole, linked] = [&whole, &linked]
                    .map(|module| translate(module).map(|kernel| vm_ir::text::print(&kernel.module)));
                assert_eq!(whole.unwrap(), linked.unwrap(), "{name}: {kernel}");
            }
        }
    }
}
