//! Copies a template's syntax tree and replaces what can grow without bound by calls of
//! [`guard`](super::guard).
//!
//! The engine counts instructions, yet one instruction may double a string. Here every operator that makes a
//! value becomes a filter of ours that pays for the result first. Doing it in the tree also keeps the
//! compiler from folding `'x' * 100000000` into a constant.
use super::{Refusal, guard};
use minijinja::{
    Value,
    machinery::{
        Span,
        ast::{
            BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, CompareOpKind, Const, Do,
            EmitExpr, Expr, Filter, FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map,
            Set, SetBlock, Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
        },
    },
};

/// Nesting of statements and expressions; operators in a row nest too.
const DEPTH: usize = 256;

type Copied<T> = Result<T, Refusal>;

/// The guarded copy of a template. Refused: what refers to other templates, escaping, and deeper nesting than
/// 256.
pub(super) fn guarded<'a>(tree: &Stmt<'a>) -> Copied<Stmt<'a>> {
    Rewriter { depth: 0 }.stmt(tree)
}

struct Rewriter {
    depth: usize,
}

impl Rewriter {
    fn stmt<'a>(&mut self, stmt: &Stmt<'a>) -> Copied<Stmt<'a>> {
        self.depth += 1;
        let copy = self.stmt_inside(stmt);
        self.depth -= 1;
        copy
    }

    fn stmt_inside<'a>(&mut self, stmt: &Stmt<'a>) -> Copied<Stmt<'a>> {
        Ok(match stmt {
            Stmt::Template(s) => Stmt::Template(at(s, Template { children: self.body(&s.children)? })),
            Stmt::EmitExpr(s) => Stmt::EmitExpr(at(s, EmitExpr { expr: self.expr(&s.expr)? })),
            // Raw text in a loop is output like any other: as an expression it passes the formatter.
            Stmt::EmitRaw(s) => {
                let text = Expr::Const(at(s, Const { value: Value::from(s.raw) }));
                Stmt::EmitExpr(at(s, EmitExpr { expr: text }))
            }
            Stmt::ForLoop(s) => Stmt::ForLoop(at(
                s,
                ForLoop {
                    target: self.target(&s.target)?,
                    iter: self.expr(&s.iter)?,
                    filter_expr: self.optional(&s.filter_expr)?,
                    recursive: s.recursive,
                    body: self.body(&s.body)?,
                    else_body: self.body(&s.else_body)?,
                },
            )),
            Stmt::IfCond(s) => Stmt::IfCond(at(
                s,
                IfCond {
                    expr: self.expr(&s.expr)?,
                    true_body: self.body(&s.true_body)?,
                    false_body: self.body(&s.false_body)?,
                },
            )),
            Stmt::WithBlock(s) => {
                let assignments = s.assignments.iter().map(|(t, e)| Ok((self.target(t)?, self.expr(e)?)));
                let assignments = assignments.collect::<Copied<_>>()?;
                Stmt::WithBlock(at(s, WithBlock { assignments, body: self.body(&s.body)? }))
            }
            Stmt::Set(s) => {
                let mut expr = self.expr(&s.expr)?;
                // Attributes of a namespace outlive a loop, so they could grow a structure without end.
                if matches!(s.target, Expr::GetAttr(_)) {
                    expr = through(guard::KEPT, s.span(), expr, vec![]);
                }
                Stmt::Set(at(s, Set { target: self.target(&s.target)?, expr }))
            }
            Stmt::SetBlock(s) => Stmt::SetBlock(at(
                s,
                SetBlock {
                    target: self.target(&s.target)?,
                    filter: self.optional(&s.filter)?,
                    body: self.body(&s.body)?,
                },
            )),
            Stmt::FilterBlock(s) => {
                let filter = self.expr(&s.filter)?;
                Stmt::FilterBlock(at(s, FilterBlock { filter, body: self.body(&s.body)? }))
            }
            Stmt::Macro(s) => Stmt::Macro(at(s, self.macro_parts(s)?)),
            Stmt::CallBlock(s) => {
                let (call, declared) = (self.call_parts(&s.call)?, self.macro_parts(&s.macro_decl)?);
                let parts = CallBlock { call: at(&s.call, call), macro_decl: at(&s.macro_decl, declared) };
                Stmt::CallBlock(at(s, parts))
            }
            Stmt::Do(s) => Stmt::Do(at(s, Do { call: at(&s.call, self.call_parts(&s.call)?) })),
            Stmt::Continue(s) => Stmt::Continue(at(s, minijinja::machinery::ast::Continue)),
            Stmt::Break(s) => Stmt::Break(at(s, minijinja::machinery::ast::Break)),
            Stmt::AutoEscape(s) => return refuse(s.span(), "autoescape"),
            Stmt::Block(s) => return refuse(s.span(), "block"),
            Stmt::Import(s) => return refuse(s.span(), "import"),
            Stmt::FromImport(s) => return refuse(s.span(), "from ... import"),
            Stmt::Extends(s) => return refuse(s.span(), "extends"),
            Stmt::Include(s) => return refuse(s.span(), "include"),
        })
    }

    fn expr<'a>(&mut self, expr: &Expr<'a>) -> Copied<Expr<'a>> {
        if self.depth >= DEPTH {
            return refuse(expr.span(), "nesting of more than 256 levels");
        }
        self.depth += 1;
        let copy = self.expr_inside(expr);
        self.depth -= 1;
        copy
    }

    fn expr_inside<'a>(&mut self, expr: &Expr<'a>) -> Copied<Expr<'a>> {
        let span = expr.span();
        let made = |expr| through(guard::MADE, span, expr, vec![]);
        let ticking = |expr| through(guard::TICK, span, expr, vec![]);
        Ok(match expr {
            Expr::Var(e) => Expr::Var(at(e, Var { id: e.id })),
            Expr::Const(e) => Expr::Const(at(e, Const { value: e.value.clone() })),
            Expr::Slice(e) => {
                let none = || Expr::Const(Spanned::new(Const { value: Value::from(()) }, span));
                let value = self.expr(&e.expr)?;
                let bounds = [&e.start, &e.stop, &e.step].into_iter();
                let args = bounds.map(|b| Ok(CallArg::Pos(self.optional(b)?.unwrap_or_else(none))));
                through(guard::SLICE, span, value, args.collect::<Copied<_>>()?)
            }
            Expr::UnaryOp(e) => {
                let negates = matches!(e.op, UnaryOpKind::Not);
                let op = if negates { UnaryOpKind::Not } else { UnaryOpKind::Neg };
                Expr::UnaryOp(at(e, UnaryOp { op, expr: self.expr(&e.expr)? }))
            }
            Expr::BinOp(e) => {
                let (mut left, mut right) = (self.expr(&e.left)?, self.expr(&e.right)?);
                if matches!(e.op, BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte) {
                    left = through(guard::ORDERED, span, left, vec![]);
                    right = through(guard::ORDERED, span, right, vec![]);
                }
                let filter = match e.op {
                    BinOpKind::Add => Some(guard::ADD),
                    BinOpKind::Mul => Some(guard::MUL),
                    BinOpKind::Rem => Some(guard::REM),
                    BinOpKind::Concat => Some(guard::CONCAT),
                    _ => None,
                };
                match filter {
                    Some(name) => through(name, span, left, vec![CallArg::Pos(right)]),
                    None => {
                        let copy = Expr::BinOp(at(e, BinOp { op: e.op, left, right }));
                        let shortcut = matches!(e.op, BinOpKind::ScAnd | BinOpKind::ScOr);
                        if shortcut { copy } else { ticking(copy) }
                    }
                }
            }
            Expr::Compare(e) => {
                let orders = |op| {
                    use CompareOpKind::{Gt, Gte, Lt, Lte};
                    matches!(op, Lt | Lte | Gt | Gte)
                };
                let ordered =
                    |expr, both| if both { through(guard::ORDERED, span, expr, vec![]) } else { expr };
                // An operand stands between two operators; the first has one.
                let next = |i: usize| e.ops.get(i + 1).is_some_and(|o| orders(o.op));
                let ops = e.ops.iter().enumerate().map(|(i, o)| {
                    let expr = ordered(self.expr(&o.expr)?, orders(o.op) || next(i));
                    Ok(CompareOp { op: o.op, expr })
                });
                let ops = ops.collect::<Copied<_>>()?;
                let first = ordered(self.expr(&e.expr)?, e.ops.first().is_some_and(|o| orders(o.op)));
                ticking(Expr::Compare(at(e, Compare { expr: first, ops })))
            }
            Expr::IfExpr(e) => Expr::IfExpr(at(
                e,
                IfExpr {
                    test_expr: self.expr(&e.test_expr)?,
                    true_expr: self.expr(&e.true_expr)?,
                    false_expr: self.optional(&e.false_expr)?,
                },
            )),
            Expr::Filter(e) => {
                let parts = Filter { name: e.name, expr: self.optional(&e.expr)?, args: self.args(&e.args)? };
                made(Expr::Filter(at(e, parts)))
            }
            Expr::Test(e) => {
                let parts = Test { name: e.name, expr: self.expr(&e.expr)?, args: self.args(&e.args)? };
                Expr::Test(at(e, parts))
            }
            Expr::GetAttr(e) => Expr::GetAttr(at(e, GetAttr { expr: self.expr(&e.expr)?, name: e.name })),
            Expr::GetItem(e) => {
                let subscript_expr = self.expr(&e.subscript_expr)?;
                ticking(Expr::GetItem(at(e, GetItem { expr: self.expr(&e.expr)?, subscript_expr })))
            }
            Expr::Call(e) => made(Expr::Call(at(e, self.call_parts(e)?))),
            Expr::List(e) => made(Expr::List(at(e, List { items: self.all(&e.items)? }))),
            Expr::Tuple(e) => made(Expr::Tuple(at(e, Tuple { items: self.all(&e.items)? }))),
            Expr::Map(e) => {
                made(Expr::Map(at(e, Map { keys: self.all(&e.keys)?, values: self.all(&e.values)? })))
            }
        })
    }

    /// What is assigned to stays a name, an attribute or a list of them; nothing is computed.
    fn target<'a>(&mut self, target: &Expr<'a>) -> Copied<Expr<'a>> {
        Ok(match target {
            Expr::Var(e) => Expr::Var(at(e, Var { id: e.id })),
            Expr::GetAttr(e) => Expr::GetAttr(at(e, GetAttr { expr: self.target(&e.expr)?, name: e.name })),
            Expr::List(e) => {
                let items = e.items.iter().map(|i| self.target(i)).collect::<Copied<_>>()?;
                Expr::List(at(e, List { items }))
            }
            other => return refuse(other.span(), "an assignment to an expression"),
        })
    }

    fn call_parts<'a>(&mut self, call: &Call<'a>) -> Copied<Call<'a>> {
        // The callee stays what it is: `name(...)` and `value.method(...)` are told apart by their shape.
        let expr = match &call.expr {
            Expr::GetAttr(e) => Expr::GetAttr(at(e, GetAttr { expr: self.expr(&e.expr)?, name: e.name })),
            other => self.expr(other)?,
        };
        Ok(Call { expr, args: self.args(&call.args)? })
    }

    fn macro_parts<'a>(&mut self, m: &Macro<'a>) -> Copied<Macro<'a>> {
        let args = m.args.iter().map(|a| self.target(a)).collect::<Copied<_>>()?;
        Ok(Macro { name: m.name, args, defaults: self.all(&m.defaults)?, body: self.body(&m.body)? })
    }

    fn args<'a>(&mut self, args: &[CallArg<'a>]) -> Copied<Vec<CallArg<'a>>> {
        let copy = |arg: &CallArg<'a>| {
            Ok(match arg {
                CallArg::Pos(e) => CallArg::Pos(self.expr(e)?),
                CallArg::Kwarg(name, e) => CallArg::Kwarg(name, self.expr(e)?),
                CallArg::PosSplat(e) => CallArg::PosSplat(self.expr(e)?),
                CallArg::KwargSplat(e) => CallArg::KwargSplat(self.expr(e)?),
            })
        };
        args.iter().map(copy).collect()
    }

    fn body<'a>(&mut self, body: &[Stmt<'a>]) -> Copied<Vec<Stmt<'a>>> {
        body.iter().map(|s| self.stmt(s)).collect()
    }

    fn all<'a>(&mut self, exprs: &[Expr<'a>]) -> Copied<Vec<Expr<'a>>> {
        exprs.iter().map(|e| self.expr(e)).collect()
    }

    fn optional<'a>(&mut self, expr: &Option<Expr<'a>>) -> Copied<Option<Expr<'a>>> {
        expr.as_ref().map(|e| self.expr(e)).transpose()
    }
}

/// `expr | name(args)`.
fn through<'a>(name: &'static str, span: Span, expr: Expr<'a>, args: Vec<CallArg<'a>>) -> Expr<'a> {
    Expr::Filter(Spanned::new(Filter { name, expr: Some(expr), args }, span))
}

/// A copy stands where its original stood.
fn at<O, T>(original: &Spanned<O>, copy: T) -> Spanned<T> {
    Spanned::new(copy, original.span())
}

fn refuse<T>(span: Span, have: &'static str) -> Copied<T> {
    Err(Refusal { span, have })
}
