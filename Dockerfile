# docker build -t evorl . && docker run --rm -v "$PWD/runs:/population/runs" evorl
FROM python:3.12-slim
COPY . /source
# The CPU build of torch; on a machine with GPUs leave this line out.
RUN pip install --no-cache-dir torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "/source[onnx,report,video]"
WORKDIR /population
ENTRYPOINT ["evorl"]
CMD ["train", "--processes", "2", "--name", "my-run"]
