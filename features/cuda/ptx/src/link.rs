//! Links modules into one, as `cuLink…` and nvlink do.
//!
//! The result has the text of the modules' declarations. Of a name that several modules define weakly, the first definition stays.
//! A name without a linkage directive is local to its module; where another module has the same one, the later is renamed.

use crate::ast::{Ast, Kind, Linkage};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{MAX_MODULES, MAX_TEXT};
use crate::parse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::ops::Range;

/// Returns whether the driver defines a function: the system calls of kernels, and those that the device runtime
/// (`libcudadevrt.a`) calls.
fn is_of_driver(name: &str) -> bool {
    let of_runtime = || name.strip_prefix("cnp")?.chars().next();
    ["__assertfail", "free", "malloc", "vprintf"].contains(&name)
        || name.starts_with("__cuda_syscall_")
        || of_runtime().is_some_and(|c| c.is_ascii_uppercase())
}

/// A module to link.
#[derive(Clone, Copy, Debug)]
pub struct Input<'t> {
    /// Its name in messages.
    pub name: &'t str,
    /// Its PTX.
    pub text: &'t str,
    /// Whether it is linked only if it defines a name that others refer to, as a member of a library.
    pub optional: bool,
}

/// A module that was read.
struct Object<'t> {
    input: Input<'t>,
    ast: Ast,
    /// Where names of module scope occur, in order, and whether they are declared there.
    mentions: Vec<(Range<usize>, bool)>,
    /// Its declarations by name. A definition has precedence over a prototype.
    names: HashMap<&'t str, usize>,
}

/// Definitions that all modules see, by name: the number of the module, and of the declaration.
type Definitions<'t> = HashMap<&'t str, (usize, usize)>;

fn wrong(what: String) -> Error {
    Error::at(0, ErrorKind::Link(what))
}

fn twice(name: &str, module: &str, first: &str) -> Error {
    wrong(format!("Multiple definition of '{name}' in '{module}', first defined in '{first}'"))
}

/// Links modules. `max_registers` limits the registers of each kernel.
///
/// # Errors
///
/// Returns an error if a module is not PTX or exceeds a [cap](crate::limits), if two modules define a name, or if none defines a name
/// that one refers to. The messages of the last two are nvlink's, one line for each name.
pub fn link(inputs: &[Input<'_>], max_registers: Option<u32>) -> Result<String> {
    if inputs.len() > MAX_MODULES {
        return Err(Error::large(0, "modules in a link", MAX_MODULES));
    }
    if inputs.iter().map(|input| input.text.len()).sum::<usize>() > MAX_TEXT {
        return Err(Error::large(0, "bytes", MAX_TEXT));
    }
    let read = inputs.iter().map(|input| Object::read(*input)).collect::<Result<Vec<_>>>()?;
    let (mut objects, optional): (Vec<_>, Vec<_>) = read.into_iter().partition(|o| !o.input.optional);
    pull(&mut objects, optional);
    let definitions = definitions(&objects)?;
    let mut undefined = Vec::new();
    for object in &objects {
        let names: BTreeSet<&str> =
            object.external().filter(|name| !definitions.contains_key(name)).collect();
        undefined.extend(
            names.iter().map(|name| format!("Undefined reference to '{name}' in '{}'", object.input.name)),
        );
    }
    if !undefined.is_empty() {
        return Err(wrong(undefined.join("\n")));
    }
    check(&objects, &definitions)?;
    emit(&objects, &definitions, max_registers)
}

impl<'t> Object<'t> {
    fn read(input: Input<'t>) -> Result<Object<'t>> {
        let ast = parse::parse(input.text)?;
        let declared = ast.declarations.iter().map(|d| (d.name_at.clone(), true));
        let referred = |mention| (mention, false);
        let mut mentions: Vec<_> = ast.mentions.iter().cloned().map(referred).chain(declared).collect();
        for function in ast.functions.iter().filter(|function| function.at.is_some()) {
            match parse::mentions(input.text, function) {
                Ok(found) => mentions.extend(found.into_iter().map(referred)),
                // No kernel that needs the function can be translated, so its references do not matter.
                Err(error) if error.is_of_function() => {}
                Err(error) => return Err(error),
            }
        }
        mentions.sort_unstable_by_key(|(mention, _)| mention.start);
        let mut names = HashMap::new();
        for (at, new) in ast.declarations.iter().enumerate() {
            let name = &input.text[new.name_at.clone()];
            let known = names.get(name).map(|known: &usize| ast.declarations[*known].is_defined());
            match (known, new.is_defined()) {
                (Some(true), true) => return Err(twice(name, input.name, input.name)),
                (Some(_), false) => {}
                _ => drop(names.insert(name, at)),
            }
        }
        Ok(Object { input, ast, mentions, names })
    }

    /// Its definitions that all modules see.
    fn visible(&self) -> impl Iterator<Item = (usize, &'t str)> {
        let declarations = self.ast.declarations.iter().enumerate();
        let visible = declarations.filter(|(_, d)| d.is_defined() && d.linkage != Linkage::Local);
        visible.map(|(at, d)| (at, &self.input.text[d.name_at.clone()]))
    }

    /// The names that it refers to, as often as it does.
    fn references(&self) -> impl Iterator<Item = &'t str> {
        let references = self.mentions.iter().filter(|(_, is_declared)| !is_declared);
        references.map(|(mention, _)| &self.input.text[mention.clone()])
    }

    /// Those of them that it declares, and leaves to other modules to define.
    fn external(&self) -> impl Iterator<Item = &'t str> {
        self.references().filter(|name| {
            let declared = self.names.get(name).map(|at| &self.ast.declarations[*at]);
            declared.is_some_and(|d| !d.is_defined()) && !is_of_driver(name)
        })
    }

    /// A part of its text, with the names that are its own renamed.
    fn text(&self, part: Range<usize>, renamed: &HashMap<&str, String>, to: &mut String) -> Result<()> {
        let first = self.mentions.partition_point(|(mention, _)| mention.start < part.start);
        let mentions = self.mentions[first..].iter().take_while(|(mention, _)| mention.start < part.end);
        let mut at = part.start;
        for (mention, _) in mentions {
            let name = &self.input.text[mention.clone()];
            if let Some(new) = renamed.get(name) {
                to.push_str(&self.input.text[at..mention.start]);
                to.push_str(new);
                at = mention.end;
            }
        }
        to.push_str(&self.input.text[at..part.end]);
        if to.len() > MAX_TEXT { Err(Error::large(0, "bytes", MAX_TEXT)) } else { Ok(()) }
    }
}

/// Adds the modules that define what others refer to.
fn pull<'t>(objects: &mut Vec<Object<'t>>, optional: Vec<Object<'t>>) {
    let mut defined: HashSet<&str> = objects.iter().flat_map(Object::visible).map(|(_, name)| name).collect();
    let mut providers = HashMap::new();
    for (at, object) in optional.iter().enumerate() {
        for (_, name) in object.visible() {
            providers.entry(name).or_insert(at);
        }
    }
    let mut optional: Vec<_> = optional.into_iter().map(Some).collect();
    let mut at = 0;
    while let Some(object) = objects.get(at) {
        let names: Vec<&str> = object.external().collect();
        for name in names {
            let provider = providers.get(name).filter(|_| !defined.contains(name));
            if let Some(member) = provider.and_then(|at| optional[*at].take()) {
                defined.extend(member.visible().map(|(_, name)| name));
                objects.push(member);
            }
        }
        at += 1;
    }
}

fn definitions<'t>(objects: &[Object<'t>]) -> Result<Definitions<'t>> {
    let mut all = Definitions::new();
    for (module, object) in objects.iter().enumerate() {
        for (at, name) in object.visible() {
            let mut known = match all.entry(name) {
                Entry::Vacant(place) => {
                    place.insert((module, at));
                    continue;
                }
                Entry::Occupied(known) => known,
            };
            let (first, declared) = (&objects[known.get().0], &object.ast.declarations[at]);
            let kept = &first.ast.declarations[known.get().1];
            if (kept.linkage, declared.linkage) == (Linkage::Visible, Linkage::Visible) {
                return Err(twice(name, object.input.name, first.input.name));
            }
            let is_larger = match (&kept.kind, &declared.kind) {
                (Kind::Variable(old), Kind::Variable(new)) if kept.linkage == Linkage::Common => new > old,
                _ => false,
            };
            if declared.linkage > kept.linkage || declared.linkage == Linkage::Common && is_larger {
                known.insert((module, at));
            }
        }
    }
    Ok(all)
}

/// Checks that all modules declare a name as it is defined, and that none refers to a name of another that it does not declare.
fn check(objects: &[Object<'_>], definitions: &Definitions<'_>) -> Result<()> {
    let all: HashSet<&str> = objects.iter().flat_map(|o| o.names.keys().copied()).collect();
    for object in objects {
        if let Some(name) = object.references().find(|n| all.contains(n) && !object.names.contains_key(n)) {
            let kind = ErrorKind::Unknown(format!("{name} in '{}'", object.input.name));
            return Err(Error::at(0, kind));
        }
        for declared in object.ast.declarations.iter().filter(|d| d.linkage != Linkage::Local) {
            let Some((module, at)) = definitions.get(&*declared.name) else { continue };
            let first = &objects[*module];
            let what = match (&declared.kind, &first.ast.declarations[*at].kind) {
                (Kind::Variable(0), Kind::Variable(_)) => continue,
                (Kind::Variable(_), Kind::Variable(_)) if declared.linkage == Linkage::Common => continue,
                (declared, defined) if declared == defined => continue,
                // One may not know of what the function returns.
                (Kind::Function(returns, params), Kind::Function(returned, taken))
                    if params == taken && (returns.is_empty() || returned.is_empty()) =>
                {
                    continue;
                }
                (Kind::Variable(_), Kind::Variable(_)) => "Size",
                _ => "Prototype",
            };
            return Err(wrong(format!(
                "{what} doesn't match for '{}' in '{}', first specified in '{}'",
                declared.name, object.input.name, first.input.name
            )));
        }
    }
    Ok(())
}

/// Returns a suffix that occurs in no text: a name with it and a number is new in every scope.
fn marker(objects: &[Object<'_>]) -> String {
    let runs = objects.iter().flat_map(|object| object.input.text.split(|c| c != '_').map(str::len));
    format!("${}", "_".repeat(runs.max().unwrap_or(0) + 1))
}

fn emit(objects: &[Object<'_>], definitions: &Definitions<'_>, max_registers: Option<u32>) -> Result<String> {
    let version = objects.iter().map(|o| o.ast.version).max().unwrap_or_default();
    let number =
        |target: &str| target.chars().filter(char::is_ascii_digit).collect::<String>().parse::<u32>();
    let target = objects.iter().map(|o| &*o.ast.target).max_by_key(|target| (number(target).ok(), *target));
    let mut head = format!(".version {}.{}\n", version.0, version.1);
    let _ = writeln!(head, ".target {}\n.address_size 64", target.unwrap_or_default());
    let (mut variables, mut bodies, mut aliases) = (String::new(), String::new(), String::new());
    let marker = marker(objects);
    let of_driver = objects.iter().flat_map(|o| o.names.keys().copied()).filter(|name| is_of_driver(name));
    let mut taken: HashSet<&str> = definitions.keys().copied().chain(of_driver).collect();
    let (mut declared, mut count) = (HashSet::new(), 0);
    for (module, object) in objects.iter().enumerate() {
        let mut renamed = HashMap::new();
        for declaration in
            object.ast.declarations.iter().filter(|d| d.linkage == Linkage::Local && d.is_defined())
        {
            let name = &object.input.text[declaration.name_at.clone()];
            if !taken.insert(name) {
                count += 1;
                renamed.insert(name, format!("{name}{marker}{count}"));
            }
        }
        for (at, declaration) in object.ast.declarations.iter().enumerate() {
            let name = &*declaration.name;
            let is_kept = match declaration.linkage {
                _ if !declaration.is_defined() => {
                    is_of_driver(name) && !definitions.contains_key(name) && declared.insert(name)
                }
                Linkage::Local => true,
                _ => definitions.get(name) == Some(&(module, at)),
            };
            if !is_kept {
                continue;
            }
            let text = |part: &Range<usize>, to: &mut String| object.text(part.clone(), &renamed, to);
            if matches!(declaration.kind, Kind::Function(..)) {
                text(&declaration.head, &mut head)?;
                head.push_str(";\n");
            }
            match (&declaration.kind, max_registers) {
                _ if !declaration.is_defined() => {}
                _ if declaration.is_alias => {
                    text(&declaration.rest, &mut aliases)?;
                    aliases.push('\n');
                }
                (Kind::Variable(_), _) => {
                    text(&declaration.head, &mut variables)?;
                    text(&declaration.rest, &mut variables)?;
                    variables.push_str(";\n");
                }
                (kind, most) => {
                    text(&declaration.head, &mut bodies)?;
                    if let (Kind::Entry, Some(most)) = (kind, most) {
                        let _ = writeln!(bodies, ".maxnreg {most}");
                    }
                    text(&declaration.rest, &mut bodies)?;
                    bodies.push('\n');
                }
            }
        }
    }
    Ok([head, variables, bodies, aliases].concat())
}
