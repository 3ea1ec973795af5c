//! The rewriting of a syntax tree. At most one mutant is selected, so a mutant's branch has the original operands, without their mutants: otherwise long chains
//! of operators would double with each operator.

use std::collections::HashMap;

use proc_macro2::Span;
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};
use syn::{Arm, BinOp, Block, Expr, ExprStruct, File, Signature, parse_quote, parse_str};

use crate::{Mutant, Position};

/// Adds a branch for each mutant, unless it changes code that runs in the compiler. Returns the mutants that can't be parsed.
pub(crate) fn weave(file: &mut File, mutants: &[&Mutant]) -> Vec<u32> {
    let mut weaver = Weaver { by_start: HashMap::new(), bodies: Vec::new(), invalid: Vec::new() };
    for mutant in mutants.iter().copied().cloned() {
        match mutant.genre.as_str() {
            "FnValue" => weaver.bodies.push(mutant),
            _ => weaver.by_start.entry(mutant.span.start).or_default().push(mutant),
        }
    }
    weaver.visit_file_mut(file);
    weaver.invalid
}

struct Weaver {
    by_start: HashMap<Position, Vec<Mutant>>,
    /// Mutants that replace a function's body.
    bodies: Vec<Mutant>,
    invalid: Vec<u32>,
}

fn start(span: Span) -> Position {
    let start = span.start();
    Position { line: start.line, column: start.column + 1 }
}

fn end(span: Span) -> Position {
    let end = span.end();
    Position { line: end.line, column: end.column + 1 }
}

impl Weaver {
    /// The mutants of a genre that begin at `span`.
    fn at(&self, span: Span, genre: &str) -> Vec<Mutant> {
        let found = self.by_start.get(&start(span)).map(Vec::as_slice).unwrap_or_default();
        found.iter().filter(|mutant| mutant.genre == genre).cloned().collect()
    }

    /// Adds an early return for each mutant of a function's body.
    fn function(&mut self, signature: &Signature, block: &mut Block) {
        if signature.constness.is_some() {
            return;
        }
        let (from, to) = (start(block.span()), end(block.span()));
        // Inner functions take their mutants first.
        visit_mut::visit_block_mut(self, block);
        let (own, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.bodies)
            .into_iter()
            .partition(|mutant| from <= mutant.span.start && mutant.span.end <= to);
        self.bodies = others;
        for mutant in own {
            let number = mutant.number;
            if let Ok(value) = parse_str::<Expr>(&mutant.replacement) {
                block
                    .stmts
                    .insert(0, parse_quote! { if crate::woven_mutants::is(#number) { return #value; } });
            }
        }
    }
}

/// Whether a chain of conditions has a `let`, and so can't be parenthesized.
fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) if matches!(binary.op, BinOp::And(_)) => {
            has_let(&binary.left) || has_let(&binary.right)
        }
        _ => false,
    }
}

/// `changed` if the mutant is selected, else `usual`.
fn either(number: u32, changed: &Expr, usual: &Expr) -> Expr {
    let block = |expression: &Expr| Block {
        brace_token: Default::default(),
        stmts: vec![syn::Stmt::Expr(expression.clone(), None)],
    };
    let expression = Expr::If(syn::ExprIf {
        attrs: Vec::new(),
        if_token: Default::default(),
        cond: parse_quote! { crate::woven_mutants::is(#number) },
        then_branch: block(changed),
        else_branch: Some((
            Default::default(),
            Box::new(Expr::Block(syn::ExprBlock { attrs: Vec::new(), label: None, block: block(usual) })),
        )),
    });
    Expr::Paren(syn::ExprParen {
        attrs: Vec::new(),
        paren_token: Default::default(),
        expr: Box::new(expression),
    })
}

impl VisitMut for Weaver {
    fn visit_expr_mut(&mut self, expression: &mut Expr) {
        let original = expression.clone();
        match expression {
            Expr::Const(_) => return,
            Expr::Repeat(repeat) => self.visit_expr_mut(&mut repeat.expr),
            _ => visit_mut::visit_expr_mut(self, expression),
        }
        match &original {
            Expr::Binary(binary) if !has_let(&original) => {
                for mutant in self.at(binary.op.span(), "BinaryOperator") {
                    if let Ok(op) = parse_str::<BinOp>(&mutant.replacement) {
                        let mut changed = syn::ExprBinary { op, ..binary.clone() };
                        // After a type, as in `a as u8 < b`, they would begin its generic arguments.
                        if matches!(op, BinOp::Lt(_) | BinOp::Shl(_)) {
                            let left = binary.left.clone();
                            changed.left = Box::new(Expr::Paren(syn::ExprParen {
                                attrs: Vec::new(),
                                paren_token: Default::default(),
                                expr: left,
                            }));
                        }
                        *expression = either(mutant.number, &changed.into(), expression);
                    }
                }
            }
            Expr::Binary(binary) => {
                let found = self.at(binary.op.span(), "BinaryOperator");
                self.invalid.extend(found.iter().map(|mutant| mutant.number));
            }
            Expr::Unary(unary) => {
                for mutant in self.at(unary.op.span(), "UnaryOperator") {
                    *expression = either(mutant.number, &unary.expr, expression);
                }
            }
            Expr::Struct(structure) => {
                for field in &structure.fields {
                    for mutant in self.at(field.span(), "StructField") {
                        let others = structure.fields.iter().filter(|other| other.member != field.member);
                        let changed = ExprStruct { fields: others.cloned().collect(), ..structure.clone() };
                        *expression = either(mutant.number, &changed.into(), expression);
                    }
                }
            }
            _ => {}
        }
    }

    fn visit_arm_mut(&mut self, arm: &mut Arm) {
        let left_out = self.at(arm.span(), "MatchArm");
        let guard = arm.guard.as_ref().map(|(_, guard)| (guard.span(), has_let(guard)));
        visit_mut::visit_arm_mut(self, arm);
        if let (Some((span, false)), Some((_, guard))) = (guard, &mut arm.guard) {
            for mutant in self.at(span, "MatchArmGuard") {
                if let Ok(value) = parse_str::<Expr>(&mutant.replacement) {
                    **guard = either(mutant.number, &value, guard);
                }
            }
        }
        for mutant in left_out {
            let number = mutant.number;
            arm.guard = Some(match arm.guard.take() {
                Some((token, guard)) => {
                    (token, parse_quote! { !crate::woven_mutants::is(#number) && #guard })
                }
                None => (Default::default(), parse_quote! { !crate::woven_mutants::is(#number) }),
            });
        }
    }

    fn visit_item_fn_mut(&mut self, item: &mut syn::ItemFn) {
        self.function(&item.sig, &mut item.block);
    }

    fn visit_impl_item_fn_mut(&mut self, item: &mut syn::ImplItemFn) {
        self.function(&item.sig, &mut item.block);
    }

    fn visit_trait_item_fn_mut(&mut self, item: &mut syn::TraitItemFn) {
        if let Some(block) = &mut item.default {
            self.function(&item.sig, block);
        }
    }

    // Code that runs in the compiler can't read the environment.
    fn visit_item_const_mut(&mut self, _: &mut syn::ItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut syn::ItemStatic) {}
    fn visit_item_enum_mut(&mut self, _: &mut syn::ItemEnum) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_trait_item_const_mut(&mut self, _: &mut syn::TraitItemConst) {}
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_pat_mut(&mut self, _: &mut syn::Pat) {}
    fn visit_generic_argument_mut(&mut self, _: &mut syn::GenericArgument) {}
}

/// Calls `found` for each branch: the mutant's number, its branch, and both branches.
pub(crate) fn branches(file: &File, found: impl FnMut(u32, Span, Span)) {
    Branches { found }.visit_file(file);
}

struct Branches<F> {
    found: F,
}

/// The number in `crate::woven_mutants::is(NUMBER)`.
fn asked(expression: &Expr) -> Option<u32> {
    let Expr::Call(call) = expression else { return None };
    let Expr::Path(path) = &*call.func else { return None };
    let is_ours = path.path.segments.iter().any(|segment| segment.ident == "woven_mutants");
    match call.args.first() {
        Some(Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(number), .. })) if is_ours => {
            number.base10_parse().ok()
        }
        _ => None,
    }
}

impl<F: FnMut(u32, Span, Span)> Visit<'_> for Branches<F> {
    fn visit_expr_if(&mut self, expression: &syn::ExprIf) {
        if let Some(number) = asked(&expression.cond) {
            (self.found)(number, expression.then_branch.span(), expression.span());
        }
        visit::visit_expr_if(self, expression);
    }

    fn visit_arm(&mut self, arm: &Arm) {
        let mut guard = arm.guard.as_ref().map(|(_, guard)| &**guard);
        while let Some(expression) = guard {
            let (first, rest) = match expression {
                Expr::Binary(binary) => (&*binary.left, Some(&*binary.left)),
                other => (other, None),
            };
            if let Expr::Unary(unary) = first
                && let Some(number) = asked(&unary.expr)
            {
                (self.found)(number, first.span(), arm.span());
            }
            guard = rest;
        }
        visit::visit_arm(self, arm);
    }
}
