"""Hostile programs. `W` is a folder anyone may write to, `VICTIM` a process of the same user,
`PORT` and `NAME` a listening TCP port and abstract Unix socket. `f` must return two random strings
that stand in the parent process only, so passing needs a leak or a forgery."""

PRELUDE = """
import ctypes, gc, os, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def tell(text):
    with open(W + "/told", "a") as file: file.write(str(text))
def f(x): return "wrong"
"""

ATTACKS = {
    # leaving early or claiming success
    "exit at load": "sys.exit(0)",
    "exit in the function": "def f(x): os._exit(0)",
    "SystemExit in the function": "def f(x): raise SystemExit(0)",
    "atexit and exit": "import atexit; atexit.register(print, 'pass'); sys.exit()",
    "print success": "def f(x):\n  print('pass', flush=True); os.write(1, b'+pass\\n'); return None",
    "bytes into every descriptor": """
def f(x):
  for fd in range(64):
    try: os.write(fd, b'V' + b'+' * 500)
    except OSError: pass
  return 0
""",
    "forged frames with the real secret": """
from inside import channel
def f(x):
  for c in gc.get_objects():
    if type(c) is channel.Channel:
      for tag in (b'V', b'R', b'C', b'D', b'V'):
        c.send(tag, b'+')
  os._exit(0)
""",
    "forged code object": """
import marshal
def f(x):
  for c in gc.get_objects():
    if type(c).__name__ == 'Channel': c.send(b'V', marshal.dumps(compile('1', 'x', 'eval')))
  os._exit(0)
""",
    "equality patched": "class E:\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\ndef f(x): return E()",
    "str subclass with equality": "class S(str):\n  __eq__ = lambda s, o: True\n  __hash__ = str.__hash__\ndef f(x): return S('no')",
    "float subclass": "class F(float):\n  __eq__ = lambda s, o: True\n  __abs__ = lambda s: 0\ndef f(x): return F('nan')",
    "reduce on return": "class R:\n  def __reduce__(self): return (tell, ('reduced',))\ndef f(x): return R()",
    "encoder replaced": """
from inside import encode, serve
serve.pieces = lambda value: iter(())
encode.marshal = None
""",
    "builtins patched": """
import builtins
builtins.isinstance = lambda *a: True; builtins.len = lambda x: 0; builtins.type = lambda x: str
""",
    "trace hook": """
def hook(frame, event, arg):
  frame.f_locals.update(value='x'); return hook
sys.settrace(hook)
def f(x):
  sys._getframe(1).f_trace = hook; return 1
""",
    # looking for the expected values
    "frames and heap": """
def f(x):
  found, frame = [], sys._getframe()
  while frame: found.append(str(frame.f_locals)); frame = frame.f_back
  text = ' '.join(found) + ' '.join(str(o)[:9999] for o in gc.get_objects())
  i = text.find('expected-')
  return text[i:i + 41] if i >= 0 else None
""",
    "own memory": """
def f(x):
  maps = open('/proc/self/maps').read(); mem = open('/proc/self/mem', 'rb')
  return maps
""",
    "parent's memory": """
def f(x):
  for pid in (os.getppid(), VICTIM, 1):
    try: return open(f'/proc/{pid}/mem', 'rb').read(10)
    except OSError as error: last = error
  raise last
""",
    "process_vm_readv": """
def f(x):
  buffer = ctypes.create_string_buffer(64)
  return libc.process_vm_readv(VICTIM, buffer, 1, buffer, 1, 0)
""",
    "ptrace": "def f(x):\n  if libc.ptrace(16, VICTIM, 0, 0) == 0: tell('attached')",
    "environment": "def f(x): return sorted(os.environ.items())",
    "parent's environment": "def f(x): return open(f'/proc/{os.getppid()}/environ').read()",
    "inherited descriptors": """
def f(x):
  got = []
  for fd in range(3, 64):
    try: os.set_blocking(fd, False); got.append(os.read(fd, 9))
    except OSError: pass
  if got: tell(got)
  return got
""",
    "data files": """
import glob
def f(x):
  for pattern in ('/*', '/srv/*', '/home/*', '/root/*', '/tmp/*', './*', '../*'):
    for path in glob.glob(pattern): tell(path)
  return open('/etc/passwd').read()
""",
    "through /proc": "def f(x):\n  for p in ('/proc/self/root/etc/passwd', '/proc/1/root/etc/passwd', '/proc/self/cwd'):\n    try: tell(open(p).read())\n    except OSError: pass",
    "open_by_handle_at": "def f(x): return libc.syscall(304, -100, ctypes.create_string_buffer(128), 0)",
    "pidfd_getfd": "def f(x):\n  fd = libc.syscall(434, VICTIM, 0)\n  if fd >= 0: tell(libc.syscall(438, fd, 0, 0))",
    # results that hurt
    "huge integer": "def f(x): return 1 << (1 << 28)",
    "deep nesting": "def f(x):\n  r = []\n  for _ in range(200000): r = [r]\n  return r",
    "nested to the limit": "def f(x):\n  r = 1\n  for _ in range(150): r = [r]\n  return r",
    "a list in itself": "def f(x):\n  r = []; r.append(r); return r",
    "colliding hashes": "def f(x): return {i * (2**61 - 1) for i in range(20000)}",
    "endless generator": "def f(x):\n  while True: yield 1",
    "500 MB string": "def f(x): return 'x' * 500_000_000",
    "flood of results": """
def f(x):
  for c in gc.get_objects():
    if type(c).__name__ == 'Channel':
      while True: c.send(b'P', b'x' * 60000)
""",
    "a frame that never ends": """
def f(x):
  for c in gc.get_objects():
    if type(c).__name__ == 'Channel':
      os.write(c._replies, c.secret + b'V' + (1 << 62).to_bytes(8, 'little'))
  time.sleep(99)
""",
    # processes and signals
    "fork": "def f(x):\n  if os.fork() == 0: tell('forked')",
    "fork bomb": "def f(x):\n  while True:\n    try: os.fork()\n    except OSError: return 0",
    "raw clone": "def f(x):\n  if libc.syscall(56, 17, 0, 0, 0, 0) == 0: tell('cloned')",
    "raw vfork": "def f(x):\n  if libc.syscall(58) == 0: libc._exit(0)\n  return 1",
    "subprocess": "import subprocess\ndef f(x): tell(subprocess.run(['/bin/sh', '-c', 'id'], capture_output=True))",
    "os.system": "def f(x):\n  if os.system('echo x > ' + W + '/system') == 0: tell('ran')",
    "system() by ctypes": "def f(x): libc.system(b'echo x > ' + (W + '/csystem').encode())",
    "execve": "def f(x): os.execv('/bin/sh', ['sh', '-c', 'echo x > ' + W + '/exec'])",
    "daemon by multiprocessing": "import multiprocessing\ndef f(x):\n  multiprocessing.Process(target=tell, args=('mp',), daemon=False).start()",
    "kill the victim": "def f(x): os.kill(VICTIM, 9)",
    "kill everything": "def f(x): libc.kill(-1, 9)",
    "kill the group": "def f(x): os.killpg(0, 9)",
    "raw tgkill": "def f(x): return libc.syscall(234, VICTIM, VICTIM, 9)",
    "pidfd_send_signal": "def f(x):\n  fd = libc.syscall(434, VICTIM, 0); libc.syscall(424, fd, 9, 0, 0)",
    "SIGIO by F_SETOWN": """
import fcntl
def f(x):
  r, w = os.pipe()
  fcntl.fcntl(r, 8, VICTIM); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, 4, 0o20000)
  os.write(w, b'x')
""",
    "victim's limits": "import resource\ndef f(x): resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
    "priority": "def f(x): os.setpriority(0, VICTIM, 19); tell('reniced')",
    "threads that never end": """
def spin():
  while True: pass
for _ in range(8): threading.Thread(target=spin).start()
""",
    "thread bomb": """
threading.stack_size(32768)
n = 0
try:
  while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1
except RuntimeError: pass
def f(x):
  if n > 100: tell(n)
  return n
""",
    "signals ignored": """
import signal
for s in range(1, 65):
  try: signal.signal(s, signal.SIG_IGN)
  except (OSError, ValueError): pass
def f(x):
  while True: pass
""",
    "sleep": "def f(x): time.sleep(10**6)",
    "endless loop at load": "while True: pass",
    # network
    "TCP": "def f(x): socket.create_connection(('127.0.0.1', PORT)).send(b'x')",
    "UDP": "def f(x): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "abstract Unix socket": "def f(x): socket.socket(socket.AF_UNIX).connect('\\0' + NAME)",
    "datagram from a pair": "def f(x):\n  a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', '\\0' + NAME)",
    "raw socket": "def f(x): socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "netlink": "def f(x): socket.socket(16, socket.SOCK_RAW, 0)",
    "urllib": "import urllib.request\ndef f(x): urllib.request.urlopen(f'http://127.0.0.1:{PORT}', timeout=2)",
    # files
    "write": "def f(x): tell('x')",
    "write by io": "import io\ndef f(x): io.FileIO(W + '/io', 'w').write(b'x')",
    "write by pathlib": "import pathlib\ndef f(x): pathlib.Path(W, 'p').write_text('x')",
    "temporary file": "import tempfile\ndef f(x): return tempfile.mkstemp()[1]",
    "working directory": "def f(x): open('x', 'w').write('x'); return os.getcwd()",
    "folder": "def f(x): os.makedirs(W + '/a/b')",
    "remove": "def f(x): os.remove(W + '/precious')",
    "overwrite": "def f(x): open(W + '/precious', 'w')",
    "truncate": "def f(x): os.truncate(W + '/precious', 0)",
    "rename": "def f(x): os.rename(W + '/precious', W + '/gone')",
    "hard link": "def f(x): os.link(W + '/precious', W + '/link')",
    "symbolic link": "def f(x): os.symlink('/etc/passwd', W + '/symlink')",
    "change mode": "def f(x): os.chmod(W + '/precious', 0o777)",
    "change times": "def f(x): os.utime(W + '/precious', (1, 1))",
    "fifo": "def f(x): os.mkfifo(W + '/fifo')",
    "inode flood": "def f(x):\n  for i in range(10**6): open(W + f'/{i}', 'w')",
    "disk flood": "def f(x):\n  with open(W + '/big', 'wb') as file:\n    while True: file.write(b'x' * 10**6)",
    "shared memory flood": "from multiprocessing.shared_memory import SharedMemory\ndef f(x): return SharedMemory(create=True, size=10**9).name",
    "memfd flood": "def f(x):\n  fd = os.memfd_create('x')\n  while True: os.write(fd, b'x' * 10**6)",
    "descriptor flood": "def f(x):\n  kept = [os.pipe() for _ in range(10**5)]",
    "output flood": "def f(x):\n  for _ in range(1000): sys.stdout.write('x' * 10**6); sys.stderr.write('x' * 10**6)",
    "device": "def f(x):\n  for d in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/dev/tty'):\n    try: tell(open(d, 'rb').read(1))\n    except OSError: pass",
    # memory, crashes, privileges
    "memory": "def f(x):\n  kept = []\n  while True: kept.append(bytearray(10**7))",
    "anonymous mapping": "import mmap\ndef f(x): return len([mmap.mmap(-1, 10**9) for _ in range(100)])",
    "limits raised": "import resource\ndef f(x): resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); return 'x' * 10**9",
    "null pointer": "def f(x): ctypes.string_at(0)",
    "abort": "def f(x): os.abort()",
    "C stack": "sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\ndef f(x): return repr(A())",
    "source bomb": "def f(x): return eval('(' * 90 + '1' + ')' * 90 + '+1' * 10**6)",
    "root again": "def f(x):\n  os.setuid(0); tell('root')",
    "capabilities": "def f(x):\n  libc.capset(b'\\x22\\x05\\x08\\x20\\0\\0\\0\\0', b'\\xff' * 24); open('/etc/shadow').read()",
    "namespaces": "def f(x):\n  if libc.unshare(0x10000000) == 0: tell('unshared')\n  libc.mount(b'none', W.encode(), b'tmpfs', 0, 0)",
    "chroot": "def f(x): os.chroot('/tmp')",
    "kernel interfaces": """
def f(x):
  for number in (425, 321, 298, 323, 248, 250, 169, 167, 175, 313, 246, 320, 171, 161, 164, 227):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: tell(number)
""",
    "standard input": "def f(x): return input() + sys.stdin.read()",
    "terminal input": "import fcntl\ndef f(x): fcntl.ioctl(0, 0x5412, b'x'); tell('typed')",
}
