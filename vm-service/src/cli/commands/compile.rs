//! `compile`: a kernel file to code for a target.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;

use vm_ir::text::{Mark, render};
use vm_ir::{Kernel, ValidModule};
use vm_jit::legal::{self, Support};
use vm_jit::{Artifact, Entry, Note, Target};
use vm_passthrough::accelerator::assembled;

use super::{model, targets};
use crate::api::{self, Body};
use crate::cli::context::Context;
use crate::cli::kernel::args::{self, CompileArgs, TargetArg};
use crate::cli::kernel::file::Loaded;
use crate::cli::kernel::{argument, assembler, cache, file, wait};
use crate::failure::Failure;
use crate::text::table::{Table, printable};

/// Compiles a file, and prints or writes the code.
///
/// # Errors
/// When the file is no valid module, the target rejects it, or the code can't be written.
pub(crate) fn run(context: &mut Context<'_>, arguments: &CompileArgs) -> Result<(), Failure> {
    // There are both unless targets are listed.
    let (Some(path), Some(target)) = (&arguments.file, &arguments.target) else {
        return targets::list(context);
    };
    let TargetArg::Kernels(target) = target else { return model::compile(context, arguments, path) };
    let loaded = file::load(path, args::trust(arguments.trusted))?;
    if let Some(output) = &arguments.output {
        file::spare(path, output)?;
    }
    if arguments.legal {
        return legal(context, path, &loaded, target);
    }
    let output = arguments.output.as_deref();
    let wanted = output.map(|output| assembler::wanted(output, target, arguments.deadline));
    let (artifact, format) = {
        let (Loaded { module, source }, path, target) =
            (loaded.clone(), path.clone(), with_lines(path, target));
        let (assembler, cache) = (wanted.transpose()?.flatten(), context.cache.clone());
        let what = format!("compiling {} for {target}", path.display());
        wait::run(&what, arguments.deadline, move || {
            let mut artifact = vm_jit::compile(&module, &target).map_err(|rejected| {
                Failure::failed(file::behind(&path, rejected.0.iter().map(|reject| reject.render(&source))))
            })?;
            let Some(assembler) = assembler else {
                let format = artifact.format.to_string();
                return Ok((artifact, format));
            };
            let cache = cache::open(cache.as_deref(), cache::CODE_BYTES);
            let code = assembled(&cache, &*assembler, &module, &target, &artifact.code);
            artifact.code = code.map_err(Failure::failed)?.to_vec();
            Ok((artifact, assembler.product()))
        })
    }?;
    let module = loaded.module;
    if artifact.text().is_none() && arguments.output.is_none() && (context.json || io::stdout().is_terminal())
    {
        return Err(Failure::usage(format_args!(
            "the code is {format}, which is no text; write it to a file with --output"
        )));
    }
    if let Some(path) = &arguments.output {
        write(path, &artifact.code)?;
    } else if !context.json {
        return print_code(context, &artifact);
    }
    context.print(
        || Body::Compile(document(arguments, target, &module, &artifact, &format)),
        || summary(arguments, target, &module, &artifact, (&format, &loaded.source)),
    )
}

/// Writes code to a file, whole or not at all.
pub(super) fn write(path: &Path, code: &[u8]) -> Result<(), Failure> {
    vm_files::replace(path, |mut file| file.write_all(code)).map_err(|error| {
        Failure::failed(format_args!(
            "{} can't be written: {error}; check the path and its permissions",
            path.display()
        ))
    })
}

/// The target, with the lines of the file in the code where it can hold them.
fn with_lines(path: &Path, target: &Target) -> Target {
    let mut target = target.clone();
    if let Target::Ptx(options) = &mut target {
        options.source = Some(path.display().to_string());
    }
    target
}

fn print_code(context: &mut Context<'_>, artifact: &Artifact) -> Result<(), Failure> {
    context.out.write_all(&artifact.code)?;
    Ok(context.out.flush()?)
}

fn kernel<'m>(module: &'m ValidModule, entry: &Entry) -> Option<&'m Kernel> {
    module.kernel(&entry.kernel)
}

fn summary(
    arguments: &CompileArgs,
    target: &Target,
    module: &ValidModule,
    artifact: &Artifact,
    (format, source): (&str, &str),
) -> String {
    let mut text = format!("{target}: {format}, {} bytes", artifact.code.len());
    if let Some(path) = &arguments.output {
        // Writing to a string does not fail, here and below.
        let _ = write!(text, " in {}", printable(&path.display().to_string()));
    }
    text.push('\n');
    let mut table = Table::new(["KERNEL", "BLOCK", "SHARED", "PRODUCTS", "PARAMETERS"]);
    for entry in &artifact.entries {
        let parameters = kernel(module, entry).map_or_else(String::new, |kernel| {
            let all: Vec<_> = kernel.params().iter().map(|param| argument::describe(kernel, param)).collect();
            all.join(", ")
        });
        let shared = u64::from(entry.static_shared) + u64::from(entry.dynamic_shared);
        let products = match products_of(entry) {
            names if names.is_empty() => "-".to_owned(),
            names => names.join(", "),
        };
        table.push([
            format!("@{}", entry.kernel),
            sizes(entry.block),
            shared.to_string(),
            products,
            parameters,
        ]);
    }
    let _ = write!(text, "{table}");
    for entry in &artifact.entries {
        for Note { line, what } in entry.products.iter().flat_map(|products| &products.fallback) {
            let message = format!("@{} goes not by wgmma, line {line}: {what}", entry.kernel);
            let _ = writeln!(
                text,
                "{}",
                render(source, &Mark { line: *line, message: &message, ..Mark::default() })
            );
        }
    }
    text
}

/// The instructions of a tile kernel's products.
fn products_of(entry: &Entry) -> Vec<String> {
    entry.products.iter().flat_map(|products| &products.by).map(ToString::to_string).collect()
}

/// `256×1×1`.
pub(super) fn sizes([x, y, z]: [u32; 3]) -> String {
    format!("{x}×{y}×{z}")
}

fn document(
    arguments: &CompileArgs,
    target: &Target,
    module: &ValidModule,
    artifact: &Artifact,
    format: &str,
) -> api::Compiled {
    let file = arguments.output.as_ref().map(|path| path.display().to_string());
    api::Compiled {
        target: target.to_string(),
        format: format.to_owned(),
        code_bytes: artifact.code.len(),
        code: if file.is_none() { artifact.text().map(str::to_owned) } else { None },
        file,
        kernels: artifact.entries.iter().map(|entry| compiled_kernel(module, entry)).collect(),
    }
}

fn compiled_kernel(module: &ValidModule, entry: &Entry) -> api::CompiledKernel {
    let parameters = kernel(module, entry).into_iter().flat_map(|kernel| {
        kernel.params().iter().zip(&entry.params.slots).map(|(param, slot)| {
            let text = argument::describe(kernel, param);
            api::KernelParameter {
                name: param.name.to_string(),
                parameter_type: text.split_once(": ").map_or(text.clone(), |(_, ty)| ty.to_owned()),
                offset: slot.offset(),
            }
        })
    });
    api::CompiledKernel {
        name: entry.kernel.clone(),
        symbol: entry.symbol.clone(),
        block: entry.block,
        static_shared_bytes: entry.static_shared,
        dynamic_shared_bytes: entry.dynamic_shared,
        parameter_bytes: entry.params.bytes,
        parameters: parameters.collect(),
        products: products_of(entry),
        fallback: entry
            .products
            .iter()
            .flat_map(|products| &products.fallback)
            .map(|Note { line, what }| api::Note { line: *line, message: what.clone() })
            .collect(),
        stop_word_offset: entry.params.guard.map(|guard| guard.stop),
        iterations_offset: entry.params.guard.map(|guard| guard.fuel),
    }
}

/// `--legal`: how the target does what the file uses. It fails, once that is printed, when the file does not compile.
fn legal(context: &mut Context<'_>, path: &Path, loaded: &Loaded, target: &Target) -> Result<(), Failure> {
    let module = &loaded.module;
    let uses = legal::survey(module, target);
    let rejects = legal::rejects(module, target);
    context.print(
        || {
            Body::Legal(api::Legal {
                target: target.to_string(),
                compiles: rejects.is_empty(),
                ops: uses.iter().map(legal_op).collect(),
                rejects: rejects
                    .iter()
                    .map(|reject| api::Reject {
                        code: reject.kind.code().to_owned(),
                        kernel: reject.kernel.clone(),
                        line: reject.line,
                        message: reject.to_string(),
                    })
                    .collect(),
            })
        },
        || {
            let mut table = Table::new(["OP", "TYPE", "USES", "LINE", "SUPPORT"]);
            for used in &uses {
                let ty = if used.to == used.ty {
                    used.ty.to_string()
                } else {
                    format!("{} to {}", used.ty, used.to)
                };
                table.push([
                    used.op.mnemonic().to_owned(),
                    ty,
                    used.count.to_string(),
                    used.line.to_string(),
                    used.support.to_string(),
                ]);
            }
            table.to_string()
        },
    )?;
    if rejects.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(file::behind(path, rejects.iter().map(|reject| reject.render(&loaded.source)))))
}

fn legal_op(used: &legal::Use) -> api::LegalOp {
    let (support, how) = match used.support {
        Support::Native => (api::Support::Native, None),
        Support::Expanded(how) => (api::Support::Expanded, Some(how.to_owned())),
        Support::Rejected(code) => (api::Support::Rejected, Some(code.to_owned())),
    };
    api::LegalOp {
        op: used.op.mnemonic().to_owned(),
        op_type: used.ty.to_string(),
        to: (used.to != used.ty).then(|| used.to.to_string()),
        count: used.count,
        line: used.line,
        support,
        how,
    }
}
