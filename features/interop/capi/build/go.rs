//! What is made of the tables for Go: constants and calls of `accelerator.txt`, and the functions of `functions.txt`, over slices.

use std::fmt::Write as _;

use super::accelerator::{Item, Kind};
use super::table::{Function, Language, Parameter};

const HEAD: &str = "// Code generated from features/interop/capi by its build script; DO NOT EDIT.\n// VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header\n\npackage vmaccel\n\n";

/// `head_dim` or `VMA_KERNEL_STOPPED` in the letters that Go has, the first one large or not.
fn camel(name: &str, large: bool) -> String {
    let lower = name.contains('_') || name.len() > 1;
    let mut out = String::new();
    for (at, word) in name.split('_').filter(|word| !word.is_empty()).enumerate() {
        let (first, rest) = word.split_at(1);
        let first = if at > 0 || large { first.to_uppercase() } else { first.to_lowercase() };
        out += &first;
        out += &if lower && word.chars().all(|letter| !letter.is_lowercase()) {
            rest.to_lowercase()
        } else {
            rest.into()
        };
    }
    out
}

/// The values of enumerations, and a function for each call, which looks at its status.
pub(crate) fn accelerators(items: &[Item]) -> String {
    let mut out = format!("{HEAD}// #include <vmaccel.h>\nimport \"C\"\n\n");
    for Item { comment, kind } in items {
        match kind {
            Kind::Enum(name, values) => {
                let name = camel(name.trim_start_matches("vma_"), true);
                let _ = writeln!(out, "// {name}: {}\ntype {name} int32\n\nconst (", comment.join(" "));
                for (comment, value, number) in values {
                    let value = camel(value.trim_start_matches("VMA_"), true);
                    // Short ones would be those of other things.
                    let prefix = match name.as_str() {
                        "Status" | "Type" => name.as_str(),
                        "ParameterKind" => "Parameter",
                        _ => "",
                    };
                    let _ = writeln!(out, "\t// {}\n\t{prefix}{value} {name} = {number}", comment.join(" "));
                }
                out += ")\n\n";
            }
            Kind::Function { result, name, parameters } if result == "vma_status" => {
                let go = |kind: &str| match kind {
                    "void *" | "const void *" => "unsafe.Pointer".to_owned(),
                    "void **" => "*unsafe.Pointer".into(),
                    kind => {
                        let of = kind.trim_start_matches("const ").trim_end_matches([' ', '*']);
                        format!("{}C.{of}", if kind.ends_with('*') { "*" } else { "" })
                    }
                };
                // Names of types and packages are no names of parameters.
                let named = |name: &str| match camel(name, false).as_str() {
                    "type" => "kind".into(),
                    name => name.to_owned(),
                };
                let given: Vec<String> =
                    parameters.iter().map(|one| format!("{} {}", named(&one.name), go(&one.kind))).collect();
                let passed: Vec<String> = parameters.iter().map(|one| named(&one.name)).collect();
                let _ = writeln!(
                    out,
                    "func {}({}) error {{\n\treturn call(func() C.vma_status {{ return C.{name}({}) }})\n}}\n",
                    camel(name, false),
                    given.join(", "),
                    passed.join(", ")
                );
            }
            _ => {}
        }
    }
    if out.contains("unsafe.Pointer") {
        out = out.replacen("import \"C\"\n", "import \"C\"\n\nimport \"unsafe\"\n", 1);
    }
    out.trim_end().to_owned() + "\n"
}

/// The functions over slices, whose lengths are checked before each call.
pub(crate) fn kernels(functions: &[Function]) -> String {
    let mut out = format!("{HEAD}// #include <vmkernels.h>\nimport \"C\"\n\nimport \"math\"\n\n");
    for function in functions {
        let Function { name, parameters, elements, workspace, .. } = function;
        let go = camel(name.trim_start_matches("cuda_"), true);
        let mut comment = function.comment(Language::C);
        comment.push("Slices that are too short are refused.".into());
        let _ = writeln!(out, "// {go}: {}", comment.join("\n// "));
        let slice = |kind: &str, element: &str| match kind
            .trim_start_matches("const ")
            .trim_end_matches([' ', '*'])
        {
            "T" => element.to_owned(),
            "float" => "float32".into(),
            "int32_t" => "int32".into(),
            "int64_t" => "int64".into(),
            "uint64_t" => "uint64".into(),
            _ => "uint8".into(),
        };
        let number = |kind: &str| match kind {
            "float" => "float32",
            "int64_t" => "int64",
            "uint64_t" => "uint64",
            "flag" => "bool",
            _ => "int32",
        };
        let shown = parameters.iter().filter(|one| !one.is_scratch());
        let given: Vec<String> = shown
            .map(|one| {
                let name = camel(one.name, false);
                if one.is_pointer() {
                    format!("{name} []{}", slice(one.kind, "T"))
                } else {
                    format!("{name} {}", number(one.kind))
                }
            })
            .collect();
        let _ = writeln!(out, "func {go}[T Float]({}) error {{", given.join(", "));
        let words: Vec<String> = parameters
            .iter()
            .map(|one| {
                let name = camel(one.name, false);
                match one.kind {
                    _ if one.is_scratch() => "1".into(),
                    _ if one.is_pointer() && one.is_optional() => format!("given({name})"),
                    _ if one.is_pointer() => "1".into(),
                    "float" => format!("uint64(math.Float32bits({name}))"),
                    "flag" => format!("flag({name})"),
                    _ => format!("uint64({name})"),
                }
            })
            .collect();
        let sizes: Vec<String> = parameters
            .iter()
            .map(|one| {
                let name = camel(one.name, false);
                if one.is_pointer() && !one.is_scratch() {
                    format!("{{\"{name}\", sizeOf({name})}}")
                } else {
                    "{}".into()
                }
            })
            .collect();
        let _ = writeln!(
            out,
            "\tif err := checkSizes(\"{name}\"+suffix[T](), []uint64{{{}}}, []extent{{{}}}); err != nil {{\n\t\treturn err\n\t}}",
            words.join(", "),
            sizes.join(", ")
        );
        let scratch = parameters.iter().find(|one| one.is_scratch());
        out += "\tvar t T\n\tswitch any(t).(type) {\n";
        for (number_of, element) in elements.iter().enumerate() {
            let suffix = if number_of == 0 { String::new() } else { format!("_{element}") };
            let (in_go, in_c) = match *element {
                "bf16" => ("BF16", "vmk_bf16"),
                "f16" => ("F16", "vmk_f16"),
                _ => ("float32", "float"),
            };
            let c = |kind: &str| match slice(kind, "T").as_str() {
                "T" => in_c.to_owned(),
                "float32" => "float".into(),
                "uint8" => "uint8_t".into(),
                other => format!("{other}_t"),
            };
            let value = |one: &Parameter| {
                let name = camel(one.name, false);
                match one.kind {
                    _ if one.is_scratch() => "(*C.float)(address(space))".into(),
                    kind if one.is_pointer() => format!("(*C.{})(address({name}))", c(kind)),
                    "flag" => format!("C.int(flag({name}))"),
                    "float" | "int" => format!("C.{}({name})", one.kind),
                    kind => format!("C.{kind}({name})"),
                }
            };
            let mut passed: Vec<String> = parameters.iter().map(value).collect();
            let numbers: Vec<String> = parameters.iter().filter(|one| !one.is_pointer()).map(value).collect();
            let _ = writeln!(out, "\tcase {in_go}:");
            let mut full = format!("{name}{suffix}");
            if *workspace || scratch.is_some() {
                let _ = writeln!(
                    out,
                    "\t\tspace, err := workspace(func(bytes *C.size_t) C.vmk_status {{\n\t\t\treturn C.{full}_workspace_size({}, bytes)\n\t\t}})\n\t\tif err != nil {{\n\t\t\treturn err\n\t\t}}",
                    numbers.join(", ")
                );
            }
            if *workspace {
                full += "_ws";
                passed.push("address(space)".into());
                passed.push("C.size_t(8*len(space))".into());
            }
            passed.push("nil".into());
            let _ = writeln!(
                out,
                "\t\treturn callKernel(func() C.vmk_status {{\n\t\t\treturn C.{full}({})\n\t\t}})",
                passed.join(", ")
            );
        }
        out += "\t}\n\treturn errNoElements\n}\n\n";
    }
    out.trim_end().to_owned() + "\n"
}
