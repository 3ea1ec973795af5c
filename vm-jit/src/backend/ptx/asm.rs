//! PTX text: registers, operands, labels.
//!
//! Registers are untyped bits (`.b16`, `.b32`, `.b64`), which every PTX instruction of that width accepts, so
//! a change of type within a width costs nothing.

/// What a register holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Pred,
    B16,
    B32,
    B64,
}

impl Class {
    const ALL: [Class; 4] = [Class::Pred, Class::B16, Class::B32, Class::B64];

    fn prefix(self) -> &'static str {
        ["%p", "%h", "%r", "%d"][self as usize]
    }

    pub(super) fn ty(self) -> &'static str {
        ["pred", "b16", "b32", "b64"][self as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Reg {
    pub(super) class: Class,
    number: u32,
}

impl Reg {
    /// Stands for a value that is not defined yet.
    pub(super) const NONE: Reg = Reg { class: Class::Pred, number: u32::MAX };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(u32);

/// An operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg<'a> {
    Reg(Reg),
    Int(i64),
    /// A float by its bits.
    F32(u32),
    F64(u64),
    /// A special register or a symbol.
    Name(&'a str),
    /// `{a, b}`
    List(&'a [Reg]),
    /// `[a + offset]`
    At(Reg, i64),
    /// `[map, {column, row, …}]`
    Tensor(Reg, &'a [Reg]),
    /// `[name + offset]`
    AtName(&'a str, i64),
    Label(Label),
}

impl From<Reg> for Arg<'_> {
    fn from(reg: Reg) -> Self {
        Arg::Reg(reg)
    }
}

impl From<i64> for Arg<'_> {
    fn from(value: i64) -> Self {
        Arg::Int(value)
    }
}

impl<'a> From<&'a str> for Arg<'a> {
    fn from(name: &'a str) -> Self {
        Arg::Name(name)
    }
}

/// The instructions of one kernel.
#[derive(Debug, Default)]
pub(super) struct Asm {
    pub(super) text: String,
    /// What runs rarely, and lies behind all else.
    cold: String,
    /// How many there are.
    pub(super) instructions: u64,
    counts: [u32; 4],
    labels: u32,
}

pub(super) fn push_int(text: &mut String, value: i64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = value.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if value < 0 {
        text.push('-');
    }
    text.extend(digits[at..].iter().map(|d| char::from(*d)));
}

fn push_hex(text: &mut String, bits: u64, digits: u32) {
    for i in (0..digits).rev() {
        text.push(char::from(b"0123456789abcdef"[(bits >> (4 * i) & 15) as usize]));
    }
}

impl Asm {
    pub(super) fn new_reg(&mut self, class: Class) -> Reg {
        let number = self.counts[class as usize];
        self.counts[class as usize] += 1;
        Reg { class, number }
    }

    /// From here on writes what runs rarely, or goes back from that.
    pub(super) fn swap_cold(&mut self) {
        std::mem::swap(&mut self.text, &mut self.cold);
    }

    /// Writes all instructions, what runs rarely behind all else.
    pub(super) fn write(&self, text: &mut String) {
        text.push_str(&self.text);
        text.push_str(&self.cold);
    }

    pub(super) fn new_label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    fn reg(&mut self, reg: Reg) {
        self.text.push_str(reg.class.prefix());
        push_int(&mut self.text, i64::from(reg.number));
    }

    fn offset(&mut self, offset: i64) {
        if offset != 0 {
            self.text.push('+');
            push_int(&mut self.text, offset);
        }
        self.text.push(']');
    }

    fn label(&mut self, label: Label) {
        self.text.push_str("$L");
        push_int(&mut self.text, i64::from(label.0));
    }

    fn arg(&mut self, arg: Arg) {
        match arg {
            Arg::Reg(reg) => self.reg(reg),
            Arg::Int(value) => push_int(&mut self.text, value),
            Arg::F32(bits) => {
                self.text.push_str("0f");
                push_hex(&mut self.text, u64::from(bits), 8);
            }
            Arg::F64(bits) => {
                self.text.push_str("0d");
                push_hex(&mut self.text, bits, 16);
            }
            Arg::Name(name) => self.text.push_str(name),
            Arg::List(regs) => {
                self.text.push('{');
                for (i, reg) in regs.iter().enumerate() {
                    if i > 0 {
                        self.text.push_str(", ");
                    }
                    self.reg(*reg);
                }
                self.text.push('}');
            }
            Arg::At(reg, offset) => {
                self.text.push('[');
                self.reg(reg);
                self.offset(offset);
            }
            Arg::Tensor(map, coordinates) => {
                self.text.push('[');
                self.reg(map);
                self.text.push_str(", ");
                self.arg(Arg::List(coordinates));
                self.text.push(']');
            }
            Arg::AtName(name, offset) => {
                self.text.push('[');
                self.text.push_str(name);
                self.offset(offset);
            }
            Arg::Label(label) => self.label(label),
        }
    }

    /// One instruction, under a predicate if there is one.
    pub(super) fn ins(&mut self, when: Option<(Reg, bool)>, name: &str, args: &[Arg]) {
        self.instructions += 1;
        self.text.push('\t');
        if let Some((reg, sense)) = when {
            self.text.push_str(if sense { "@" } else { "@!" });
            self.reg(reg);
            self.text.push(' ');
        }
        self.text.push_str(name);
        for (i, arg) in args.iter().enumerate() {
            self.text.push_str(if i == 0 { " " } else { ", " });
            self.arg(*arg);
        }
        self.text.push_str(";\n");
    }

    pub(super) fn place(&mut self, label: Label) {
        self.label(label);
        self.text.push_str(":\n");
    }

    /// The declarations of all registers made so far.
    pub(super) fn declarations(&self, text: &mut String) {
        for class in Class::ALL {
            let count = self.counts[class as usize];
            if count > 0 {
                text.push_str("\t.reg .");
                text.push_str(class.ty());
                text.push(' ');
                text.push_str(class.prefix());
                text.push('<');
                push_int(text, i64::from(count));
                text.push_str(">;\n");
            }
        }
    }
}

/// `ins!(writer, "name", a, b)`: one instruction.
macro_rules! ins {
    ($w:expr, $name:expr $(, $arg:expr)*) => {{
        match [$($crate::backend::ptx::asm::Arg::from($arg)),*] {
            args => $w.asm.ins(None, $name, &args),
        }
    }};
}

/// `when!(writer, predicate, sense, "name", a, b)`: one instruction under a predicate.
macro_rules! when {
    ($w:expr, $pred:expr, $sense:expr, $name:expr $(, $arg:expr)*) => {{
        match [$($crate::backend::ptx::asm::Arg::from($arg)),*] {
            args => $w.asm.ins(Some(($pred, $sense)), $name, &args),
        }
    }};
}

/// `def!(writer, B32, "name", a, b)`: one instruction into a new register.
macro_rules! def {
    ($w:expr, $class:ident, $name:expr $(, $arg:expr)*) => {{
        let reg = $w.asm.new_reg($crate::backend::ptx::asm::Class::$class);
        match [$crate::backend::ptx::asm::Arg::Reg(reg), $($crate::backend::ptx::asm::Arg::from($arg)),*] {
            args => $w.asm.ins(None, $name, &args),
        }
        reg
    }};
}

pub(super) use {def, ins, when};
