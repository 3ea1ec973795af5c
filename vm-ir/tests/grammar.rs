//! The grammar in `docs/ir.md` is that of the parser: it is read from there, and takes what the parser and the validator take.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use vm_ir::{Trust, text, validate};

/// What a rule is made of.
#[derive(Debug)]
enum Part {
    /// `"word"`.
    Literal(String),
    /// The name of a rule, or of what is none: `@name`, `integer`.
    Rule(String),
    /// Parts one behind the other, or one of them.
    All(Vec<Part>),
    Any(Vec<Part>),
    /// `[part]`, `part*`.
    Maybe(Box<Part>),
    Many(Box<Part>),
}

/// The rules by their names.
type Grammar = HashMap<String, Part>;

/// Reads rules of the form `name = parts`, of which a part may go on in lines that begin with spaces.
fn read(source: &str) -> Grammar {
    let joined = source.replace("\n  ", " ");
    let rules = joined.lines().filter_map(|line| line.split_once(" = "));
    let rule = |(name, parts): (&str, &str)| {
        let mut tokens = tokens(parts);
        tokens.reverse();
        let part = choice(&mut tokens);
        assert!(tokens.is_empty(), "{name}: {tokens:?} is left");
        (name.trim().to_owned(), part)
    };
    rules.map(rule).collect()
}

fn tokens(parts: &str) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), parts.trim());
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '@' || c == '%';
        let end = match first {
            '"' => rest[1..].find('"').unwrap() + 2,
            c if word(c) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            _ => 1,
        };
        found.push(rest[..end].to_owned());
        rest = rest[end..].trim_start();
    }
    found
}

fn choice(tokens: &mut Vec<String>) -> Part {
    let mut any = vec![sequence(tokens)];
    while tokens.last().is_some_and(|token| token == "|") {
        tokens.pop();
        any.push(sequence(tokens));
    }
    Part::Any(any)
}

fn sequence(tokens: &mut Vec<String>) -> Part {
    let mut all = Vec::new();
    while let Some(token) = tokens.pop_if(|token| !matches!(&token[..], "|" | ")" | "]")) {
        let part = match &token[..] {
            "(" | "[" => {
                let inner = choice(tokens);
                tokens.pop();
                if token == "[" { Part::Maybe(Box::new(inner)) } else { inner }
            }
            token => match token.strip_prefix('"') {
                Some(literal) => Part::Literal(literal.trim_end_matches('"').to_owned()),
                None => Part::Rule(token.to_owned()),
            },
        };
        all.push(match tokens.pop_if(|token| token == "*") {
            Some(_) => Part::Many(Box::new(part)),
            None => part,
        });
    }
    Part::All(all)
}

/// Where texts of a grammar may end.
struct Reader<'a> {
    grammar: &'a Grammar,
    text: &'a str,
    known: HashMap<(&'a str, usize), BTreeSet<usize>>,
}

impl<'a> Reader<'a> {
    /// Behind spaces and comments.
    fn skip(&self, mut at: usize) -> usize {
        loop {
            at = self.text.len() - self.text[at..].trim_start().len();
            if !self.text[at..].starts_with(';') {
                return at;
            }
            at += self.text[at..].find('\n').unwrap_or(self.text.len() - at);
        }
    }

    fn ends(&mut self, part: &'a Part, at: usize) -> BTreeSet<usize> {
        match part {
            Part::Literal(literal) => self.literal(literal, at).into_iter().collect(),
            Part::Rule(rule) => self.rule(rule, at),
            Part::All(parts) => parts.iter().fold(BTreeSet::from([at]), |ends, part| {
                ends.into_iter().flat_map(|at| self.ends(part, at)).collect()
            }),
            Part::Any(parts) => parts.iter().flat_map(|part| self.ends(part, at)).collect(),
            Part::Maybe(part) => self.ends(part, at).into_iter().chain([at]).collect(),
            Part::Many(part) => {
                let (mut all, mut next) = (BTreeSet::from([at]), vec![at]);
                while let Some(at) = next.pop() {
                    next.extend(self.ends(part, at).into_iter().filter(|end| all.insert(*end)));
                }
                all
            }
        }
    }

    /// A word does not end amid letters; a number may follow, as in `vec4`.
    fn literal(&self, literal: &str, at: usize) -> Option<usize> {
        let at = self.skip(at);
        let rest = self.text[at..].strip_prefix(literal)?;
        let word = literal.ends_with(|c: char| c.is_ascii_alphanumeric());
        let goes_on = rest.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        (!(word && goes_on) || literal == "0x").then_some(at + literal.len())
    }

    fn rule(&mut self, rule: &'a str, at: usize) -> BTreeSet<usize> {
        let grammar = self.grammar;
        let Some(part) = grammar.get(rule) else { return self.token(rule, at).into_iter().collect() };
        if let Some(ends) = self.known.get(&(rule, at)) {
            return ends.clone();
        }
        let ends = self.ends(part, at);
        self.known.insert((rule, at), ends.clone());
        ends
    }

    /// What no rule describes.
    fn token(&self, kind: &str, at: usize) -> Option<usize> {
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let from = self.skip(at);
        let rest = &self.text[from..];
        let (sign, takes): (&str, &dyn Fn(char) -> bool) = match kind {
            "@name" => ("@", &name),
            "%name" => ("%", &name),
            "name" if !rest.starts_with(|c: char| c.is_ascii_digit()) => ("", &name),
            "hexadecimal" => ("", &|c| c.is_ascii_hexdigit()),
            "integer" | "decimal" if rest.starts_with("0x") => {
                ("0x", &|c| kind == "integer" && c.is_ascii_hexdigit())
            }
            "integer" => (if rest.starts_with('-') { "-" } else { "" }, &|c| c.is_ascii_digit()),
            "decimal" => (if rest.starts_with('-') { "-" } else { "" }, &|c| {
                c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-')
            }),
            "name" => return None,
            kind => panic!("{kind} is no rule of the grammar"),
        };
        let behind = rest.strip_prefix(sign)?;
        let length = behind.find(|c| !takes(c)).unwrap_or(behind.len());
        (length > 0).then_some(from + sign.len() + length)
    }
}

/// Is the text a module?
fn takes(grammar: &Grammar, text: &str) -> bool {
    let mut reader = Reader { grammar, text, known: HashMap::new() };
    let ends = reader.rule("module", 0);
    ends.into_iter().any(|end| reader.skip(end) == text.len())
}

fn document(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)).unwrap()
}

fn grammar() -> Grammar {
    let document = document("ir.md");
    let (_, behind) = document.split_once("## Grammar\n\n```text\n").unwrap();
    read(behind.split("```").next().unwrap())
}

/// The module is read, and valid: then the grammar has it.
fn is_valid(source: &str) -> bool {
    text::parse(source).is_ok_and(|module| validate(module, Trust::Trusted).is_ok())
}

#[test]
fn the_grammar_takes_all_kernels() {
    let grammar = grammar();
    let mut checked = 0;
    let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("filetests")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            if is_valid(&source) {
                assert!(takes(&grammar, &source), "{}", path.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 50, "{checked}");
}

#[test]
fn the_grammar_takes_no_less_than_the_parser_and_no_nonsense() {
    let grammar = grammar();
    let documents = document("ir.md") + &document("ir-tile.md");
    let examples = documents.split("```text\n").skip(1).map(|block| block.split("```").next().unwrap());
    for source in examples.filter(|source| source.starts_with("vir ")) {
        assert!(takes(&grammar, source), "{source}");
        // Without one of its words or signs it is mostly neither valid nor of the grammar.
        let mut refused = 0;
        let ends = source.char_indices().filter(|(_, c)| !c.is_ascii_alphanumeric() && !c.is_whitespace());
        for (at, sign) in ends {
            let less = format!("{}{}", &source[..at], &source[at + sign.len_utf8()..]);
            let taken = takes(&grammar, &less);
            assert!(taken || !is_valid(&less), "{less}");
            refused += usize::from(!taken);
        }
        assert!(refused > 20, "{refused}");
    }
}
