"""Chat templates do what Jinja does, to honest ends only, and tell their own text from that of messages."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jinja2")

from jaxlib_icml.lm.chat import Message
from jaxlib_icml.lm.chat_template import run_template


def as_dicts(chat):
    return [{"role": message.role, "content": message.content} for message in chat]


FIRST = Message("system", "  <|im_end|> is 'it' \"\n")
SECOND = Message("user", "<a>\nsecond line</a>tail")


def rendered(template: str, *messages: Message) -> str:
    """The text of a rendered chat, messages included."""
    segments = run_template(template, as_dicts(messages or (FIRST, SECOND)), {"bos_token": "<s>"})
    return "".join(segment.text for segment in segments)


def by_jinja(template: str) -> str:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["strftime_now"] = None
    return environment.from_string(template).render(messages=as_dicts((FIRST, SECOND)), bos_token="<s>")


class TestTemplates:
    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}[{{ m.role | upper }}]{{ m['content'] | trim }}\n{% endfor %}",
            "{% for m in messages %}{{ m.content.strip() + '\n' }}{{ m.content.rstrip() }}{{ m.content.lstrip() }}"
            "{% endfor %}",
            "{{ ('  <<' + messages[0].content + '>>' + messages[1].content + ' \n').strip() }}",
            "{{ (messages[0].content + '|' + messages[0].content) | trim }}|{{ (' ' ~ messages[0].content).lstrip() }}",
            "{{ messages[1].content.split('</a>')[-1] }}{{ messages[1].content.split('\n', 1)[0].lstrip('<') }}",
            "{{ messages[1].content.partition('line')[2] }}{{ messages[1].content.removeprefix('<a>') }}",
            "{% if '</a>' in messages[1].content %}yes{% endif %}{% if 'x' not in messages[1].content %}no{% endif %}",
            "{{ messages[1].content[:4] }}|{{ messages[1].content[2] }}|{{ messages[1].content[-4:] }}|{{ "
            "messages[:1][0].role }}",
            "{{ messages[1].content | first }}{{ messages[1].content | last }}{{ messages[1].content | length }}",
            "{% for c in messages[1].content %}{{ c }}-{{ loop.index }}{% endfor %}",
            "{{ messages[1].content | upper | reverse }}{{ messages[1].content | capitalize }}"
            "{{ messages[1].content | title }}",
            "{{ messages[0] | tojson }}{{ messages | tojson(indent=2) }}"
            "{{ {'z': [1, none, true], 'a': 'é'} | tojson(sort_keys=true) }}",
            "{{ {'é': messages[0].content} | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
            "{{ messages | map(attribute='content') | map('trim') | join(', ') }}",
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
            "{{ messages | rejectattr('role', 'eq', 'x') | map(attribute='role') | join }}",
            "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}/{{ loop.length }}{{ m.content }}"
            "{{ loop.last }}{% else %}none{% endfor %}",
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
            "{{ messages[1].content.replace('second', 'SECOND').replace('line', 'ROW', 1) }}"
            "{{ messages[1].content | replace('a', 'bb') }}",
            "{{ 'pre{x}'.replace('{x}', messages[1].content) }}{{ '-'.join([messages[1].content, 'b']) }}",
            "{% macro turn(m, end='!') %}<{{ m.role }}>{{ m.content }}{{ end }}{% endmacro %}"
            "{{ turn(messages[0]) }}{{ turn(messages[1], end='') }}",
            "{{ messages[0].content.startswith('  <') }}{{ messages[1].content.endswith(('x', 'tail')) }}"
            "{{ messages[1].content.count('a') }}",
            "{{ messages[1].content.find('line') }}{{ messages[0].content == messages[1].content }}"
            "{{ messages[0].role in ['system', 'user'] }}",
            "{{ messages[0].get('name', 'nobody') }}{{ messages[0].name is defined }}"
            "{{ messages[0].content is string }}{{ messages is iterable }}",
            "{{ messages | length - 1 }}{{ 5 % 2 }}{{ 2 ** 3 }}{{ 7 // 2 }}{{ 1.5 * 2 }}{{ -3 | abs }}"
            "{{ 'a' + 'b' }}{{ [1] + [2] }}",
            "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }}{% endfor %}{{ {'b': 1, 'a': 2} | dictsort }}"
            "{{ dict(a=1) }}",
            "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
            "{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.n }}{{ ns.text }}",
            "{% set kept %}<b>{{ messages[1].content }}</b>{% endset %}{{ kept }}{{ kept | trim }}",
            "{{ messages[1].content | indent(2) }}{{ messages[1].content | indent(2, first=true) }}"
            "{{ 'a\nb' | indent }}",
            "{{ nothing }}{{ nothing | default('x') }}{{ '' | default('y', true) }}{{ messages[0].content or 'z' }}"
            "{{ 3 if messages[0].content else 4 }}",
            "{{ bos_token }}{{ 'a' if messages[0]['role'] == 'system' else 'b' }}{{ range(3) | list }}"
            "{{ range(1, 8, 3) | join('-') }}",
            "{{ [3, 1, 2] | sort }}{{ [1, 1] | unique | list }}{{ [3, 4] | max }}{{ '12' | int + 1 }}"
            "{{ 2.567 | round(1) }}{{ 7 | string }}",
            "{{ messages[1].content.content is defined }}{{ 'tool_calls' in messages[0] }}{{ 'role' in messages[0] }}",
            "{{ messages[0] == messages[-2] }}{{ messages[0] == messages[1] }}{{ messages[0] in messages[:1] }}"
            "{{ messages[0] == {'role': 'system', 'content': messages[0].content} }}",
            "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
            "{% for m in ns.all | reverse %}{{ m.content | string }}{% endfor %}",
            "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools is none }}"
            "{{ strftime_now is defined }}{{ messages[-1]['content'].split('</a>') | last }}",
            "{%- for i in range(2) -%}{% for j in range(2) %}{{ i }}{{ j }}{{ loop.index }} {% endfor %}{%- endfor -%}",
            "{% macro twice() %}{{ caller('p') }}{{ caller(messages[1].content) }}{% endmacro %}"
            "{% call(x) twice() %}{{ x }}!{% endcall %}",
            "{% filter upper %}abc{% endfilter %}{# comment #}{% raw %}{{ raw }}{% endraw %}{% with a = 1 %}{{ a }}"
            "{% endwith %}",
        ],
    )  # fmt: skip
    def test_does_what_jinja_does(self, template):
        assert rendered(template) == by_jinja(template)

    def test_parts_are_told_apart(self):
        segments = run_template("<a>{{ messages[1].content }}{{ messages[0].role }}", as_dicts((FIRST, SECOND)), {})
        assert [tuple(segment) for segment in segments] == [("<a>", None), (SECOND.content, 1), ("system", None)]

    def test_generation_blocks_and_time(self):
        assert rendered("{% generation %}{{ messages[1].content }}{% endgeneration %}") == SECOND.content
        assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10

    def test_compiled_program_keeps_nothing(self):
        template = "{{ messages[0].content ~ '|' ~ ('a' ~ 'b') ~ ('x' | upper) }}"
        for text in ("one", "two", "\ue000\ue001"):
            assert rendered(template, Message("user", text)) == f"{text}|abX"


class TestHostileTemplates:
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ ''.__class__ }}", "may not use '__class__' of an object of type str"),
            ("{{ ''['__class__'] }}", "may not use '__class__'"),
            ("{{ messages | map(attribute='__class__') | list }}", "may not use '__class__'"),
            ("{{ messages | attr('__class__') }}", "No filter named 'attr'"),
            ("{{ ().__class__.__bases__[0].__subclasses__() }}", "may not use '__class__' of an object of type tuple"),
            ("{{ range.__init__ }}", "may not use '__init__'"),
            ("{{ raise_exception.__globals__ }}", "may not use '__globals__'"),
            ("{{ self._TemplateReference__context }}", "may not use '_TemplateReference__context'"),
            ("{% macro f() %}{% endmacro %}{{ f.__func__ }}{{ f._func }}", "may not use"),
            ("{{ cycler('a').next() }}{{ lipsum() }}{{ joiner() }}", "'cycler' is undefined"),
            ("{{ messages.append(1) }}", "may not use 'append' of an object of type list"),
            ("{{ messages[0].update(a=1) }}", "may not use 'update' of an object of type dict"),
            ("{{ '{0.__class__}'.format(1) }}", "may not call an object of type function"),
            ("{{ (1).to_bytes(9, 'big') }}", "may not use 'to_bytes' of an object of type int"),
            ("{% include 'x' %}", "may not use include"),
            ("{% import 'os' as os %}", "may not use import"),
            ("{% from 'os' import path %}", "may not use fromimport"),
            ("{% extends 'x' %}", "may not use extends"),
            ("{% block a %}{% endblock %}", "may not use block"),
            ("{% autoescape true %}{% endautoescape %}", "may not use scopedevalcontextmodifier"),
            ("{% for x in [1] recursive %}{% endfor %}", "may not use a recursive loop"),
            ("{% do 1 %}", "unknown tag 'do'"),
            ("{{ range }}", "writes an object of type function"),
            ("{% set ns = namespace() %}{{ [ns] }}", "writes an object of type Namespace"),
            ("{% for m in messages %}{{ loop }}{% endfor %}", "writes an object of type LoopContext"),
            ("{{ x.y }}", "'x' is undefined"),
            ("{{ 1 // 0 }}", "ZeroDivisionError"),
            ("{% for %}", "TemplateSyntaxError"),
            ("{{ strftime_now('" + "%Y" * 51 + "') }}", "short pattern"),
            # Placeholders made up, out of range, or cut apart.
            ("{{ '\\ue000\\ue009\\ue000' }}", "makes up text of messages that do not exist"),
            ("{{ '\\ue000' }}", "cuts the text of a message apart"),
            ("{{ ('x' + messages[0].content)[:2] }}", "cuts the text of a message apart"),
            ("x" * 100_001, "template has 100001 characters, at most 100000 are allowed"),
        ],
    )  # fmt: skip
    def test_may_not(self, template, message):
        with pytest.raises(ValueError, match=message):
            rendered(template)

    def test_made_up_placeholder_only_repeats_a_message(self):
        segments = run_template("{{ '\\ue000\\ue001\\ue000' }}", as_dicts((FIRST, SECOND)), {})
        assert [tuple(segment) for segment in segments] == [(FIRST.content, 0)]

    def test_bombs(self):
        """Each would run for years or fill the memory; all are refused, in a process with little memory and time."""
        bombs = [
            "{% for i in range(10**9) %}x{% endfor %}",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% set k = j %}{% endfor %}{% endfor %}",
            "{{ 'a' * 10**9 }}", "{{ 'a' * 10000000000 }}", "{{ [1] * 10000000000 }}", "{{ 10**10**10 }}",
            "{{ '%10000000000d' % 1 }}", "{{ '%10000000000d' | format(1) }}", "{{ '{:10000000000}'.format('a') }}",
            "{{ 'a' | center(10000000000) }}", "{{ 'a'.ljust(10000000000) }}", "{{ 'a'.zfill(10000000000) }}",
            "{{ '\t'.expandtabs(10000000000) }}", "{{ [1] | batch(10000000000, 0) | list }}",
            "{{ 1 | round(10000000000, 'floor') }}", "{{ 1 | round(-10000000000) }}",
            "{{ messages | tojson(indent=10000000000) }}", "{{ messages | tojson(separators=('a', 'bbbbbbbbb')) }}",
            "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x | replace('a', n.x) %}"
            "{% endfor %}",
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "{% set n = namespace(x=(1,)) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
            "{{ n.x == n.x }}",
            "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}"
            "{{ n.x | tojson }}",
            "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "{% set n = namespace(x=messages[0].content) %}{% for i in range(99) %}"
            "{% set n.x = n.x.replace('i', n.x) %}{% endfor %}",
            "".join("{% set x %}{{ x }}{{ x }}aa{% endset %}" for _ in range(99)),
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 60 + "'aaaa'" + ")" * 60 + " }}",
            "{% for i in range(100000) %}" + "x" * 50_000 + "{% endfor %}",
            "{% set y %}{% for i in range(100000) %}" + "x" * 50_000 + "{% endfor %}{% endset %}",
            "{{ range(100000) | join(range(100000) | join(',')) }}",
            "{% set a = range(90000) | list %}{% for i in a %}{% if a == a %}{% endif %}{% endfor %}",
            "{% set a = range(90000) | list %}{% for i in a %}{% if 'x' in a %}{% endif %}{% endfor %}",
            "{% set a = range(90000) | list %}{% for i in a %}{% if a.index(89999) %}{% endif %}{% endfor %}",
            "{% set a = range(90000) %}{% for i in a %}{% if 'x' in a %}{% endif %}{% set b = a | max %}{% endfor %}",
            "{% for i in range(90000) %}{{ messages[1].content == messages[0].content }}{{ messages | tojson }}"
            "{% endfor %}",
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 5000, "{{ " + "-" * 50_000 + "1 }}",
            "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ " + "1+" * 40_000 + "1 }}",
        ]  # fmt: skip
        script = (
            "import json, resource, sys\n"
            "from jaxlib_icml.lm.chat_template import run_template\n"
            "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
            "messages = [{'role': 'user', 'content': 'i am i'}, {'role': 'user', 'content': 'x'}]\n"
            "for number, bomb in enumerate(json.load(sys.stdin)):\n"
            "    try:\n"
            "        run_template(bomb, messages, {})\n"
            "        print(number, 'was let through:', bomb[:100])\n"
            "    except ValueError:\n"
            "        pass\n"
            # Not ru_maxrss, which begins with what the parent had before the fork.
            "status = dict(line.split(':') for line in open('/proc/self/status') if ':' in line)\n"
            "assert int(status['VmHWM'].split()[0]) < 1_000_000, status['VmHWM']\n"
            "print('done')\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(bombs),
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert run.stdout == "done\n", run.stdout + run.stderr[-2000:]

    def test_random_templates(self):
        """Programs put together at random end with a text or a ValueError."""
        random = np.random.default_rng(0)
        leaves = [
            *(
                "{{ messages[0].content }}",
                "{{ m }}",
                "{% set m = m ~ m %}",
                "{% set m = [m, m] %}",
                "{{ m | tojson }}",
            ),
            *(
                "{{ f(m) }}",
                "{{ m.content[1:] }}",
                "{{ m | list | reverse }}",
                "x",
                "{{ m.content | trim }}",
                "{{ n.x }}",
            ),
            *(
                "{{ loop.index }}",
                "{{ m.split('a') | join(m) }}",
                "{% set n.x = n.x ~ m %}",
                "{% set m = messages[1] %}",
            ),
        ]
        blocks = [
            *("{% for m in messages %}|{% endfor %}", "{% if m %}|{% else %}|{% endif %}", "{% set m %}|{% endset %}"),
            *("{% macro f(m) %}|{% endmacro %}", "{% for m in m %}|{% endfor %}", "{% filter trim %}|{% endfilter %}"),
        ]

        def program(depth):
            parts = []
            for _ in range(random.integers(1, 4)):
                if depth and random.random() < 0.5:
                    first, *rest = random.choice(blocks).split("|")
                    parts.append(first + "".join(program(depth - 1) + part for part in rest))
                else:
                    parts.append(random.choice(leaves))
            return "".join(parts)

        ended = {"text": 0, "error": 0}
        for _ in range(150):
            template = "{% set n = namespace(x='') %}{% set m = 'a' %}" + program(3)
            try:
                segments = run_template(template, as_dicts((FIRST, SECOND)), {})
            except ValueError:
                ended["error"] += 1
                continue
            ended["text"] += 1
            # Everything is either the template's own or a part of a message.
            assert {segment.message for segment in segments} <= {None, 0, 1}
            assert not set("".join(segment.text for segment in segments)) & {"\ue000", "\ue001"}
        assert min(ended.values()) > 15
