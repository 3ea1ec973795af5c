//! What `functions.txt` says; its head has the grammar. Also part of `features/interop/capi/build.rs`, this file names nothing but `std`.

/// A function of the table.
#[derive(Debug)]
pub struct Function<'a> {
    /// The lines of its comment, as they are written.
    pub comment: Vec<&'a str>,
    /// Its name in C.
    pub name: &'a str,
    /// Its parameters but the stream.
    pub parameters: Vec<Parameter<'a>>,
    /// `f32`, `bf16`, ….
    pub elements: Vec<&'a str>,
    /// May it need memory beside its arguments?
    pub workspace: bool,
}

/// A parameter.
#[derive(Debug)]
pub struct Parameter<'a> {
    /// Its name in C.
    pub name: &'a str,
    /// Its type, as it is written in the table.
    pub kind: &'a str,
    /// The shape of a pointer to what is an array.
    pub shape: Option<Shape<'a>>,
    /// What is said behind.
    pub mark: Mark<'a>,
    /// What a number is where it is not given.
    pub default: Option<&'a str>,
}

/// What a mark behind a parameter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark<'a> {
    /// There is none.
    None,
    /// `?`: it may be missing; a result that a flag asks for.
    Optional(Option<&'a str>),
    /// `&`: it is read and written; only where a number is not 0, if one is named.
    Updated(Option<&'a str>),
    /// `!`: it is memory to work in, of as many bytes as are needed.
    Scratch,
    /// `%`: it is a number that calls differ in which are else the same.
    Varying,
}

/// The shape of an array.
#[derive(Debug, PartialEq, Eq)]
pub struct Shape<'a> {
    /// What stands between the brackets.
    pub text: &'a str,
    /// The extents, slowest dimension first.
    pub extents: Vec<Extent<'a>>,
}

/// An extent, or several: a name's number, times and divided by a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent<'a> {
    /// The name.
    pub name: &'a str,
    /// By what it is multiplied.
    pub times: u64,
    /// By what it is divided.
    pub by: u64,
    /// Are these any number of dimensions, of so many elements together?
    pub many: bool,
}

/// What a parameter is to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory; a buffer of the function, in the order of the parameters.
    Pointer {
        /// May it be NULL? Then the function has no such buffer.
        optional: bool,
    },
    /// Memory to work in, of as many bytes as are needed.
    Workspace,
    /// A count, or an extent: not negative.
    Extent,
    /// 0 or 1.
    Flag,
    /// Any integer.
    Number,
    /// A float, by its bits.
    Float,
    /// A number, or a float by its bits, which the same call may have another of.
    Varying,
}

/// What those give for a function who have arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument<'a> {
    /// An array, by the number of its parameter.
    Array {
        /// The parameter.
        parameter: usize,
        /// May it be missing?
        optional: bool,
    },
    /// A number that no array's shape tells, by the number of its parameter.
    Number(usize),
    /// A flag of this name: are there the results that it asks for?
    Wanted(&'a str),
}

/// Whom a comment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// C, and Go.
    C,
    /// Python.
    Python,
}

/// Reads the table.
///
/// # Errors
/// The first line that is none.
pub fn parse(table: &str) -> Result<Vec<Function<'_>>, String> {
    let mut functions = Vec::new();
    let mut comment = Vec::new();
    for line in table.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            comment.push(text);
        } else if !line.is_empty() && !line.starts_with('#') {
            let function = function(line, std::mem::take(&mut comment));
            functions.push(function.ok_or_else(|| format!("functions.txt: {line}"))?);
        }
    }
    Ok(functions)
}

fn function<'a>(line: &'a str, comment: Vec<&'a str>) -> Option<Function<'a>> {
    let (name, rest) = line.split_once('(')?;
    let (parameters, rest) = rest.rsplit_once("):")?;
    let mut elements: Vec<&str> = rest.split_whitespace().collect();
    let workspace = elements.contains(&"+workspace");
    elements.retain(|word| *word != "+workspace");
    let mut inside = false;
    let apart = |letter: char| {
        inside = (inside || letter == '[') && letter != ']';
        letter == ',' && !inside
    };
    let parameters = parameters.split(apart).map(parameter).collect::<Option<_>>()?;
    Some(Function { comment, name, parameters, elements, workspace })
}

fn parameter(text: &str) -> Option<Parameter<'_>> {
    let (text, default) = text.split_once(" = ").map_or((text, None), |(text, is)| (text, Some(is)));
    let text = text.trim();
    let end = text.find(['[', '&', '?', '!', '%']).unwrap_or(text.len());
    let at = text[..end].rfind([' ', '*'])? + 1;
    let (kind, name, rest) = (text[..at].trim(), name(&text[at..end])?, &text[end..]);
    let (shape, mark) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (text, mark) = rest.split_once(']')?;
            let extents = text.split(", ").filter(|text| !text.is_empty());
            (Some(Shape { text, extents: extents.map(extent).collect::<Option<_>>()? }), mark)
        }
        None => (None, rest),
    };
    let of = |text| Some(text).filter(|text: &&str| !text.is_empty());
    let mark = match (mark.get(..1), mark.get(1..).unwrap_or_default()) {
        (None, _) => Mark::None,
        (Some("?"), flag) => Mark::Optional(of(flag)),
        (Some("&"), number) => Mark::Updated(of(number)),
        (Some("!"), "") => Mark::Scratch,
        (Some("%"), "") => Mark::Varying,
        _ => return None,
    };
    Some(Parameter { name, kind, shape, mark, default })
}

/// A text that is a name.
fn name(text: &str) -> Option<&str> {
    Some(text).filter(|text| text.starts_with(char::is_alphabetic) && text.chars().all(of_names))
}

/// Is it a letter of names?
pub fn of_names(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

fn extent(text: &str) -> Option<Extent<'_>> {
    let (text, times, by) = match (text.split_once(" / "), text.split_once(" * ")) {
        (Some((text, by)), _) => (text, 1, by.parse().ok().filter(|by| *by > 0)?),
        (_, Some((text, times))) => (text, times.parse().ok()?, 1),
        _ => (text, 1, 1),
    };
    let many = times == by && text.ends_with("...");
    Some(Extent { name: name(text.strip_suffix("...").filter(|_| many).unwrap_or(text))?, times, by, many })
}

impl<'a> Function<'a> {
    /// The lines of its comment in the words of a language.
    pub fn comment(&self, language: Language) -> Vec<String> {
        let text = self.comment.join("\n");
        let mut said = String::new();
        let mut parts = text.split('{');
        said += parts.next().unwrap_or_default();
        for part in parts {
            let (words, rest) = part.split_once('}').unwrap_or((part, ""));
            let (c, python) = words.split_once('|').unwrap_or((words, words));
            said += if language == Language::C { c } else { python };
            said += rest;
        }
        said.lines().map(str::to_owned).collect()
    }

    /// What those give who have arrays: arrays, numbers, and the flags that ask for results.
    pub fn arguments(&self) -> Vec<Argument<'a>> {
        let (mut arrays, mut told) = (Vec::new(), Vec::new());
        let (mut numbers, mut flags) = (Vec::new(), Vec::new());
        for (at, parameter) in self.parameters.iter().enumerate().filter(|(_, one)| one.is_given()) {
            let optional = matches!(parameter.mark, Mark::Optional(_) | Mark::Updated(Some(_)));
            arrays.push(Argument::Array { parameter: at, optional });
            let extents = parameter.shape.iter().filter(|_| !optional).flat_map(|shape| &shape.extents);
            told.extend(extents.filter(|one| (one.times, one.by) == (1, 1)).map(|one| one.name));
        }
        for (at, parameter) in self.parameters.iter().enumerate() {
            match parameter.wanted().map(Argument::Wanted) {
                Some(flag) if !flags.contains(&flag) => flags.push(flag),
                _ if parameter.is_pointer() || told.contains(&parameter.name) => {}
                _ => numbers.push(Argument::Number(at)),
            }
        }
        [arrays, numbers, flags].concat()
    }

    /// What comes back to those who have arrays.
    pub fn results(&self) -> impl Iterator<Item = (usize, &Parameter<'a>)> {
        self.parameters.iter().enumerate().filter(|(_, one)| one.is_result())
    }
}

impl<'a> Parameter<'a> {
    /// What memory is of: `T`, `float`, `int32_t`, ….
    pub fn element(&self) -> &'a str {
        self.kind.trim_start_matches("const ").trim_end_matches([' ', '*'])
    }

    /// Is it memory?
    pub fn is_pointer(&self) -> bool {
        self.kind.ends_with('*')
    }

    /// May it be NULL?
    pub fn is_optional(&self) -> bool {
        matches!(self.mark, Mark::Optional(_))
    }

    /// The flag that asks for it.
    pub fn wanted(&self) -> Option<&'a str> {
        if let Mark::Optional(flag) = self.mark { flag } else { None }
    }

    /// Is it memory to work in?
    pub fn is_scratch(&self) -> bool {
        self.mark == Mark::Scratch
    }

    /// Is it an array that a function has of its caller?
    pub fn is_given(&self) -> bool {
        self.is_pointer() && (self.kind.starts_with("const ") || matches!(self.mark, Mark::Updated(_)))
    }

    /// Is it an array that a function gives back?
    pub fn is_result(&self) -> bool {
        self.is_pointer() && !self.kind.starts_with("const ") && !self.is_scratch()
    }

    /// What it is to a call.
    pub fn kind(&self) -> Kind {
        match self.kind {
            _ if self.mark == Mark::Varying => Kind::Varying,
            _ if self.is_scratch() => Kind::Workspace,
            _ if self.is_pointer() => Kind::Pointer { optional: self.is_optional() },
            "float" => Kind::Float,
            "flag" => Kind::Flag,
            "int32_t" | "uint64_t" => Kind::Number,
            _ => Kind::Extent,
        }
    }
}
